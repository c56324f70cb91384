// Server-sent events of OpenAI's API: one `data:` line of JSON each, then [DONE].

/**
 * Yields the content of every event of a body, until [DONE].
 * Throws if the stream ends without it, because the response is then incomplete.
 */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The connection closed before the response was complete.");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.startsWith("data: ") ? part.slice(6) : "";
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
