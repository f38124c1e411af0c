import { expect, test } from "vitest";
import type { History } from "../src/api/schema";
import { newest, RANGES, refreshMs, stack, startOf } from "../src/state/history";

const HOUR = RANGES[0];
const ALL = RANGES[3];
const have: History = { step_s: 10, at_s: [100, 110, 120], series: { a: [1, 2, 3] } };

test("the range All starts at time 0, because the default is one hour", () => {
  expect([startOf(HOUR, 5000), startOf(ALL, 5000)]).toEqual([1400, 0]);
});

test("stack adds columns and keeps unknown times", () => {
  expect(stack([[0.5, null, null], [0.25, 0.5, null]])).toEqual([[0.5, 0, null], [0.75, 0.5, null]]);
  expect(stack([])).toEqual([]);
});

test("newest() skips unknown values; refreshMs() is at least ten seconds", () => {
  expect([newest([1, 2, null]), newest([null]), newest(undefined), newest([0, null])]).toEqual([2, null, null, 0]);
  expect([refreshMs(null), refreshMs(have), refreshMs({ ...have, step_s: 1 }), refreshMs({ ...have, step_s: 9999 })]).toEqual([
    10_000, 10_000, 10_000, 300_000,
  ]);
});
