import { expect, test } from "vitest";
import type { History } from "../src/api/schema";
import { merge, newest, POINTS, nextRequest, RANGES, refreshMs, same, stack, startOf } from "../src/state/history";

const HOUR = RANGES[0];
const ALL = RANGES[3];
const have: History = { step_s: 10, at_s: [100, 110, 120], series: { a: [1, 2, 3] } };

test("requests the whole range first, then only new points", () => {
  expect(nextRequest(null, HOUR, 5000)).toEqual({ since: 1400, points: POINTS, whole: true });
  expect(nextRequest(have, HOUR, 145)).toEqual({ since: 120, points: 4, whole: false });
});

test("the range All requests from time 0, because the default is one hour", () => {
  expect(nextRequest(null, ALL, 5000)).toEqual({ since: 0, points: POINTS, whole: true });
  expect(nextRequest(have, ALL, 1000)).toEqual({ since: 0, points: POINTS, whole: true });
  expect(nextRequest(have, ALL, 145)).toEqual({ since: 120, points: 4, whole: false });
  const tail: History = { step_s: 10, at_s: [120, 130], series: {} };
  expect(merge(have, tail, startOf(ALL, 145)).at_s).toEqual([100, 110, 120, 130]);
});

test("requests the whole range again after a long gap or with too many points", () => {
  expect(nextRequest(have, HOUR, 1000).whole).toBe(true);
  const many = { ...have, at_s: Array.from({ length: 2 * POINTS + 1 }, (_, at) => at), series: {} };
  expect(nextRequest(many, HOUR, 2 * POINTS).whole).toBe(true);
});

test("the last point is replaced", () => {
  const next = merge(have, { step_s: 10, at_s: [120, 130], series: { a: [3.5, 4] } }, 0);
  expect(next).toEqual({ step_s: 10, at_s: [100, 110, 120, 130], series: { a: [1, 2, 3.5, 4] } });
});

test("points before the range are dropped", () => {
  const next = merge(have, { step_s: 10, at_s: [130], series: { a: [4] } }, 111);
  expect(next).toEqual({ step_s: 10, at_s: [120, 130], series: { a: [3, 4] } });
  expect(merge(have, { step_s: 10, at_s: [9000], series: { a: [4] } }, 8000).at_s).toEqual([9000]);
});

test("missing series are null", () => {
  const next = merge(have, { step_s: 10, at_s: [130], series: { b: [7] } }, 0);
  expect(next.series).toEqual({ a: [1, 2, 3, null], b: [null, null, null, 7] });
});

test("same() detects equal histories", () => {
  expect(same(have, merge(have, { step_s: 10, at_s: [], series: {} }, 0))).toBe(true);
  expect(same(have, merge(have, { step_s: 10, at_s: [120], series: { a: [9] } }, 0))).toBe(false);
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
