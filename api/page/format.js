// Formats of numbers and durations.

/** Formats with at most three significant digits: 0, 0.42, 7.1, 345, 12.3k. */
export function count(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 999_500) return `${short(value / 1e6)}M`;
  if (size >= 10_000) return `${short(value / 1e3)}k`;
  return short(value);
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 99.95 || Number.isInteger(value)) return Math.round(value).toString();
  return value.toFixed(size >= 9.995 ? 1 : size >= 0.005 ? 2 : 0).replace(/\.?0+$/, "");
}

/** Formats seconds, as ms below one second. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.9995) {
    const ms = seconds * 1e3;
    return `${ms >= 99.95 ? Math.round(ms) : ms >= 9.995 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
  }
  return seconds < 59.995 ? `${seconds.toFixed(2)} s` : age(seconds);
}

/** Formats seconds coarsely: 8 s, 4 min, 3 h 20 min, 5 d 2 h. */
export function age(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  const hours = Math.floor(seconds / 3600);
  if (hours < 24) return `${hours} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const percent = (share) => (Number.isFinite(share) ? `${Math.round(share * 100)} %` : "–");

export const gigabytes = (gibPerS) => `${count((gibPerS * 2 ** 30) / 1e9)} GB/s`;

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/**
 * Returns the TTFT and token rate of one request, as pairs of name and text. The prompt box and the
 * timeline both use this, so that they show the same values. Args: a request from GET /requests.
 */
export function speed({ ttft_s: first, last_token_s: last, completion_tokens: made }) {
  const known = first !== null && made > 1 && last > first;
  return [
    ["TTFT", duration(first)],
    ["Tokens/s", known ? count((made - 1) / (last - first)) : "–"],
  ];
}
