import { expect, test } from "vitest";
import { ABSENCE_MS, parseVisit, type Visit, wasAway, workSince } from "../src/state/visits";

const EVENING: Visit = { peer: "a", at: 1_000_000, tokens: 500, merged: 400, rounds: 3 };
const MORNING: Visit = { peer: "a", at: 1_000_000 + 9 * 3_600_000, tokens: 90_500, merged: 80_400, rounds: 87 };

test("an absence is noticed after ten minutes, and only for the same node", () => {
  expect(wasAway(EVENING, MORNING)).toBe(true);
  expect(wasAway(EVENING, { ...MORNING, at: EVENING.at + ABSENCE_MS - 1 })).toBe(false);
  expect(wasAway(EVENING, { ...MORNING, peer: "b" })).toBe(false);
  expect(wasAway(EVENING, { ...MORNING, tokens: 10 }), "a new data folder").toBe(false);
  expect(wasAway(null, MORNING)).toBe(false);
});

test("the work since a visit is the difference of the counters", () => {
  expect(workSince(EVENING, MORNING)).toEqual({ seconds: 9 * 3600, tokens: 90_000, merged: 80_000, rounds: 84 });
});

test("a stored visit that is damaged is ignored", () => {
  expect(parseVisit(JSON.stringify(EVENING))).toEqual(EVENING);
  for (const text of [null, "", "{", "null", "[]", '{"peer":"a"}', JSON.stringify({ ...EVENING, tokens: "many" })]) {
    expect(parseVisit(text)).toBeNull();
  }
});
