import { expect, test } from "vitest";
import { moment, soon, tomorrowAt } from "../src/words/time";

// vite.config.ts sets the zone: Europe/Berlin puts its clocks forward on 29 March and back on 25 October 2026.

test.each([
  ["an ordinary night", "2026-11-22T15:00:00+01:00", "2026-11-23T07:00:00.000Z"],
  ["the night that is an hour shorter", "2026-03-28T20:00:00+01:00", "2026-03-29T06:00:00.000Z"],
  ["the night that is an hour longer", "2026-10-24T20:00:00+02:00", "2026-10-25T07:00:00.000Z"],
  ["the day before the month's end", "2026-11-30T23:59:00+01:00", "2026-12-01T07:00:00.000Z"],
  ["after midnight", "2026-11-22T00:30:00+01:00", "2026-11-23T07:00:00.000Z"],
])("tomorrow at eight: %s", (_, now, then) => {
  expect(tomorrowAt(new Date(now), 8).toISOString()).toBe(then);
});

test("moments are said as one says them today", () => {
  const now = Date.parse("2026-11-22T15:00:00+01:00");
  expect(soon(Date.parse("2026-11-22T22:00:00+01:00"), now)).toBe("22:00");
  expect(soon(Date.parse("2026-11-23T08:00:00+01:00"), now)).toBe("tomorrow 08:00");
  expect(soon(Date.parse("2026-11-25T08:00:00+01:00"), now)).toMatch(/25 Nov/);
});

test("what is no moment is none", () => {
  expect(moment("2026-11-22T15:00:00.000Z")).toBe(1_795_359_600_000);
  expect([moment(""), moment(null), moment("soon")]).toEqual([null, null, null]);
});
