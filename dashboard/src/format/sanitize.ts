/** Makes text from other peers safe to show. The page creates text nodes only, so markup is harmless. */

/** Control, bidirectional, invisible and tag characters. Joiners stay, because scripts and emoji need them. */
const HOSTILE =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]|\p{Cs}/gu;
const PILED_MARKS = /(\p{M}{3})\p{M}+/gu;
const REPLACEMENT = "\ufffd";

/** Replaces characters that hide or reorder text, and limits combining marks. Line ends and tabs stay. */
export function clean(text: string): string {
  return text.replace(/\r\n/g, "\n").replace(HOSTILE, REPLACEMENT).replace(PILED_MARKS, "$1");
}

/** A name on one line of at most `most` characters, never empty. */
export function cleanName(name: string, most = 64): string {
  const shown = clean(name).replace(/\s+/g, " ").trim();
  const letters = [...shown];
  if (!letters.length) return "(no name)";
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : shown;
}
