import { expect, test } from "vitest";
import { ABSENCE_MS, later, parseVisit, wasAway } from "../src/state/visits";

const EVENING = { peer: "a", at: 1_000_000 };
const MORNING = { peer: "a", at: 1_000_000 + 9 * 3_600_000 };

test("an absence is noticed after ten minutes, and only for the same node", () => {
  expect(wasAway(EVENING, MORNING)).toBe(true);
  expect(wasAway(EVENING, { peer: "a", at: EVENING.at + ABSENCE_MS - 1 })).toBe(false);
  expect(wasAway(EVENING, { ...MORNING, peer: "b" })).toBe(false);
  expect(wasAway(null, MORNING)).toBe(false);
});

test("a stored visit that is damaged is ignored", () => {
  expect(parseVisit(JSON.stringify({ ...EVENING, tokens: 5 })), "as an older page stored it").toEqual(EVENING);
  for (const text of [null, "", "{", "null", "[]", '{"peer":"a"}', JSON.stringify({ ...EVENING, at: "noon" })]) {
    expect(parseVisit(text)).toBeNull();
  }
});

test("the later one of two visits counts", () => {
  expect([later(EVENING, MORNING), later(MORNING, EVENING)]).toEqual([MORNING, MORNING]);
  expect([later(null, EVENING), later(EVENING, null), later(null, null)]).toEqual([EVENING, EVENING, null]);
});
