// TTFT and token rate of one request. Both the prompt box and the timeline use this, so that they
// show the same values.

import { count, duration } from "./format.js";

/** Returns pairs of name and text. Args: a request from GET /requests. */
export function speed({ ttft_s: first, last_token_s: last, completion_tokens: made }) {
  const known = first !== null && made > 1 && last > first;
  return [
    ["TTFT", duration(first)],
    ["Tokens/s", known ? count((made - 1) / (last - first)) : "–"],
  ];
}
