// The controller's REST API.

const TOKEN = "slipstream-token";

/** The API requires a token, or refused the one that was sent. */
export class TokenNeeded extends Error {}

/** Error of the API, with its message. */
export class ApiError extends Error {}

/** Stores a token until the browser tab is closed. */
export function useToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

/** Exchanges the code of a one-time link for a token. */
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
  if (response.status === 401) throw new TokenNeeded("an API token is required");
  return response;
}

async function answer(response) {
  const body = response.status === 204 ? null : await response.json();
  if (response.ok) return body;
  const further = (body.errors ?? []).map(({ pointer, message }) => `${pointer} ${message}`);
  throw new ApiError([body.detail ?? response.statusText, ...further].join("\n"));
}

/** Returns the response to a GET; throws an ApiError with the controller's message. */
export async function getJson(path) {
  return answer(await ask("GET", path));
}

/** Sends a request that changes something; `revision` is the run's as it was read, if the API requires it. */
export async function act(method, path, body, revision) {
  const headers = revision === undefined ? {} : { "If-Match": `"${revision}"` };
  return answer(await ask(method, path, { body, headers }));
}

/** Yields events of a run after `seq` as they arrive; the last item is the run itself, after it has ended. */
export function readEvents(id, seq, signal) {
  return readStream(`/v1/runs/${id}/events/stream?after_seq=${seq}`, signal);
}

/** Yields lines of one worker's log, or of all, as they arrive; the last item is empty, after the run has ended. */
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

/** Downloads the response to a GET as a file. */
export async function download(path, name) {
  const response = await ask("GET", path);
  if (!response.ok) throw new ApiError((await response.json()).detail);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
