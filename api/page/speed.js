// How fast one request went, by the router's own record of it: the one place where that is worked
// out, so that two parts of the page never say two things of one request.

import { count, duration } from "./format.js";

/** Pairs of a name and a text. Args: a request as GET /requests tells it. */
export function speed({ ttft_s: first, last_token_s: last, completion_tokens: made }) {
  const known = first !== null && made > 1 && last > first;
  return [
    ["First token", duration(first)],
    ["Tokens/s", known ? count((made - 1) / (last - first)) : "–"],
  ];
}
