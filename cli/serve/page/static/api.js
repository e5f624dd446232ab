// The server's API: what it offers, and answers as they are streamed.

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

const requireOk = async (response) => {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error?.message ?? message;
  } catch {
    // No error object: a proxy between, maybe.
  }
  throw new ServerError(message, response.status);
};

export const getJson = async (path, key) => {
  const response = await fetch(path, { headers: headers(key) });
  return (await requireOk(response)).json();
};

// Data of server-sent events, whatever pieces they come in.
export async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value.replaceAll("\r", "");
      let end;
      while ((end = held.indexOf("\n\n")) >= 0) {
        const lines = held.slice(0, end).split("\n");
        held = held.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

// The chunks of a chat completion. Leaving the loop, or `signal`, ends the answer on the server.
export async function* chatChunks(body, key, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  await requireOk(response);
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "the answer failed", 500);
    yield chunk;
  }
}
