// The server's API as this page needs it.

export class ApiError extends Error {}

async function call(path, key, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server does not answer");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new ApiError(body?.error?.message ?? `the server answers with status ${response.status}`);
  }
  return response;
}

export async function models(key) {
  return (await (await call("/v1/models", key)).json()).data;
}

// Yields {text, activity, finish} for every token of one answer.
export async function* complete(model, body, key, signal) {
  const path = model.chat ? "/v1/chat/completions" : "/v1/completions";
  const asked = { ...body, model: model.id, stream: true, activity: true };
  const response = await call(path, key, { method: "POST", body: JSON.stringify(asked), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const piece = JSON.parse(data);
    if (piece.error) throw new ApiError(piece.error.message);
    for (const choice of piece.choices) {
      if (choice.delta?.role) continue; // opens the message, holds no token
      yield {
        text: choice.delta?.content ?? choice.text ?? "",
        activity: choice.activity ?? null,
        finish: choice.finish_reason,
      };
    }
  }
  throw new ApiError("the connection ended before the answer did");
}

// The data of server-sent events; an event may come in several pieces of the network.
export async function* events(stream) {
  let pending = "";
  for await (const text of chunks(stream.pipeThrough(new TextDecoderStream()))) {
    pending += text;
    const parts = pending.split("\n\n");
    pending = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice(6);
    }
  }
}

// Not every browser can iterate over a stream by itself.
async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
