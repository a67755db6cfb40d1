// Calls to the server with the key that was typed in, and server-sent events.

const KEY_NAME = "turnout-api-key";

/** An answer other than 2xx, or none; the message is one sentence for people. */
export class ApiFailure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function hasKey() {
  return sessionStorage.getItem(KEY_NAME) !== null;
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY_NAME, key);
  else sessionStorage.removeItem(KEY_NAME);
}

function headersOf(body) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  if (hasKey()) headers.Authorization = `Bearer ${sessionStorage.getItem(KEY_NAME)}`;
  return headers;
}

/** Whether a signal of ours ended the call. */
export function wasEnded(error) {
  return error.name === "AbortError" || error.name === "TimeoutError";
}

async function refusalOf(response) {
  const text = await response.text();
  let message = `The server answered with status ${response.status}.`;
  if (response.headers.get("content-type")?.startsWith("application/json")) {
    message = JSON.parse(text).error?.message ?? message;
  }
  return new ApiFailure(message, response.status);
}

/** The response, if it is 2xx. `body` makes it a POST. Throws ApiFailure, or what `signal` was ended with. */
export async function call(path, { body, signal } = {}) {
  const method = body === undefined ? "GET" : "POST";
  let response;
  try {
    response = await fetch(path, { method, headers: headersOf(body), body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (wasEnded(error)) throw error;
    throw new ApiFailure("The server cannot be reached.");
  }
  if (!response.ok) throw await refusalOf(response);
  return response;
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

/** The JSON of each event of a stream, up to its [DONE]. Comments are passed over. Throws ApiFailure. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (wasEnded(error)) throw error;
      throw new ApiFailure("The connection broke before the answer was complete.");
    }
    if (read.done) throw new ApiFailure("The stream ended before the answer was complete.");
    const parts = (rest + read.value).split("\n\n");
    rest = parts.pop();
    for (const data of parts.map(dataOf)) {
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiFailure(event.error.message);
      yield event;
    }
  }
}
