import { expect, test } from "vitest";
import { clean, cleanName } from "../src/format/sanitize";

test("characters that reorder or hide text are replaced", () => {
  for (const hostile of ["\u202e", "\u2066", "\u200f", "\u061c", "\u200b", "\ufeff", "\u0000", "\u001b", "\u0085", "\u2028", "\u{e0041}"]) {
    expect(clean(`a${hostile}b`)).toBe("a\ufffdb");
  }
  expect(clean("a\ud800b")).toBe("a\ufffdb");
});

test("markup is kept, because it is only shown in text nodes", () => {
  expect(clean("<script>alert(1)</script>")).toBe("<script>alert(1)</script>");
});

test("text of any script is kept", () => {
  for (const honest of ["Zoë", "日本語", "עברית", "हिन्दी", "👩\u200d💻", "a\tb\nc"]) expect(clean(honest)).toBe(honest);
  expect(clean("a\r\nb")).toBe("a\nb");
});

test("combining marks are limited", () => {
  expect(clean(`a${"\u0301".repeat(50)}`)).toBe(`a${"\u0301".repeat(3)}`);
});

test("names are one line, short and never empty", () => {
  expect(cleanName("  my\n\nnode ")).toBe("my node");
  expect(cleanName("x".repeat(100), 10)).toBe(`${"x".repeat(9)}…`);
  expect([...cleanName("👍".repeat(100), 10)]).toHaveLength(10);
  expect(cleanName(" \n ")).toBe("(no name)");
});
