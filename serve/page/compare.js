// Two answers to one question, token by token.

/** Index of the first token that differs, or that only one of them has; -1 where there is none. */
export function firstDifference(one, other) {
  const length = Math.max(one.tokens.length, other.tokens.length);
  for (let i = 0; i < length; i += 1) if (one.tokens[i]?.id !== other.tokens[i]?.id) return i;
  return -1;
}

/** In words: identical, or where not; and how fast each was. */
export function verdict(speculated, plain, at) {
  const shown = ({ tokens }) => (tokens[at] ? JSON.stringify(tokens[at].text) : "its end");
  const outcome =
    at < 0
      ? `identical: ${plain.tokens.length} tokens`
      : `first difference at token ${at + 1}: ${shown(speculated)} with speculation, ${shown(plain)} without`;
  const ratio = plain.speed ? ` (${(speculated.speed / plain.speed).toFixed(2)}x)` : "";
  return { outcome, speeds: `${speculated.speed.toFixed(1)} tok/s with speculation, ${plain.speed.toFixed(1)} without${ratio}` };
}
