// Server-sent events, as OpenAI's API sends them: one `data:` line of JSON each, [DONE] at the end.

/**
 * Gives the content of every event of a body. Returns once [DONE] has come.
 * Throws if the stream ends without it: then the answer is not whole.
 */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The connection ended before the answer did.");
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
