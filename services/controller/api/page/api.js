// The controller's REST API.

const TOKEN = "slipstream-token";

/** The API refused the token, or wants one. */
export class TokenNeeded extends Error {}

/** Keep a token until the browser tab is closed. */
export function useToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

async function get(path, signal) {
  const token = sessionStorage.getItem(TOKEN);
  const response = await fetch(path, { signal, headers: token ? { Authorization: `Bearer ${token}` } : {} });
  if (response.status === 401) throw new TokenNeeded("an API token is needed");
  return response;
}

/** The answer to a GET; an error carries what the controller says. */
export async function getJson(path) {
  const response = await get(path);
  const body = await response.json();
  if (!response.ok) throw new Error(body.detail ?? response.statusText);
  return body;
}

/** Events of a run from behind `seq`, as they come; the last one is the run itself, once it has ended. */
export function readEvents(id, seq, signal) {
  return readStream(`/v1/runs/${id}/events/stream?after_seq=${seq}`, signal);
}

/** Lines of one worker's log, or of all, as they come; the last one is empty, once the run has ended. */
export function readLogs(id, component, tailLines, signal) {
  return readStream(`/v1/runs/${id}/logs/stream?component=${component}&tail_lines=${tailLines}`, signal);
}

async function* readStream(path, signal) {
  const response = await get(path, signal);
  if (!response.ok) throw new Error(response.statusText);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value.replaceAll("\r\n", "\n")).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5));
      if (data.length) yield JSON.parse(data.join("\n"));
    }
  }
}
