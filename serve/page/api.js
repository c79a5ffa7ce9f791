// The server's interface: OpenAI's, and what it adds for this page (`token_details`, `round_details`, `speculate`).

/** A failure to show, as one line. `status` is that of HTTP, if the server answered. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message.replace(/\s+/g, " ").trim());
    this.status = status;
  }
}

/** The name of the model that is served. */
export async function servedModel(key) {
  const answer = await (await request("v1/models", { key })).json();
  return answer.data[0].id;
}

/** Ask for a chat completion: the chunks of its stream, as they come. Aborting `signal` ends it with an AbortError. */
export async function chat(body, { key, signal }) {
  const options = { method: "POST", body: JSON.stringify({ ...body, stream: true, token_details: true }), key, signal };
  const response = await request("v1/chat/completions", options);
  return chunks(response.body);
}

async function request(path, { key, ...options }) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await reached(fetch(path, { ...options, headers }));
  if (!response.ok) throw new ServerError(await reason(response), response.status);
  return response;
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answers ${response.status} ${response.statusText}`;
  }
}

async function* chunks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reached(reader.read());
    if (done) throw new ServerError("The connection ended before the answer did.");
    const events = (held + value).split(/\r?\n\r?\n/);
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment that keeps the connection alive
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message);
      yield chunk;
    }
  }
}

async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(`The server cannot be reached (${error.message}).`);
  }
}
