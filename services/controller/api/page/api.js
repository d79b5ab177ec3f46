// The controller's REST API.

const TOKEN = "slipstream-token";

/** The API refused the token, or wants one. */
export class TokenNeeded extends Error {}

/** The API refused a request and said why. */
export class Refused extends Error {}

/** Keep a token until the browser tab is closed. */
export function useToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

/** Take the token that a one-time link stands for. */
export async function signIn(code) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch("/page/sign-in", { method: "POST", headers, body: JSON.stringify({ code }) });
  if (response.ok) useToken((await response.json()).token);
}

async function ask(method, path, { body, signal, headers = {} } = {}) {
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, signal, headers, body: body && JSON.stringify(body) });
  if (response.status === 401) throw new TokenNeeded("an API token is needed");
  return response;
}

async function answer(response) {
  const body = response.status === 204 ? null : await response.json();
  if (response.ok) return body;
  const further = (body.errors ?? []).map(({ pointer, message }) => `${pointer} ${message}`);
  throw new Refused([body.detail ?? response.statusText, ...further].join("\n"));
}

/** The answer to a GET; an error carries what the controller says. */
export async function getJson(path) {
  return answer(await ask("GET", path));
}

/** Have something done; `revision` is the run's as it was read, where the API wants to know it. */
export async function act(method, path, body, revision) {
  const headers = revision === undefined ? {} : { "If-Match": `"${revision}"` };
  return answer(await ask(method, path, { body, headers }));
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
  const response = await ask("GET", path, { signal });
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

/** Save what a GET answers as a file of the browser's. */
export async function download(path, name) {
  const response = await ask("GET", path);
  if (!response.ok) throw new Refused((await response.json()).detail);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
