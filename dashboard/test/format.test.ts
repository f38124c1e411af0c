import { expect, test } from "vitest";
import {
  bare, brief, bytes, bytesPerSecond, clockWithSeconds, count, decimals, duration, energy, hours, many,
  moment, ordinal, percent, soon, timeLeft, tokensPerSecond, tomorrowAt,
} from "../src/format/format";

const plain = (text: string) => text.replaceAll("\u202f", " ");

test.each([
  [0, "0"], [999, "999"], [1000, "1.00 k"], [1234567, "1.23 M"], [999_499, "999 k"], [999_950, "1.00 M"], [12_345, "12.3 k"],
  [2e9, "2.00 G"], [-1500, "-1.50 k"], [null, "–"], [undefined, "–"], [Number.NaN, "–"],
])("count(%s)", (value, text) => {
  expect(plain(count(value))).toBe(text);
});

test("bytes and rates have a unit with a narrow space", () => {
  expect(plain(bytes(3_400_000_000))).toBe("3.40 GB");
  expect(plain(bytes(512))).toBe("512 B");
  expect(plain(bytesPerSecond(1_250_000))).toBe("1.25 MB/s");
  expect(plain(tokensPerSecond(45_100))).toBe("45.1 k tok/s");
  expect(bytes(512)).not.toContain(" ");
});

test.each([
  [0, "0 s"], [0.0004, "<1 ms"], [0.042, "42 ms"], [0.42, "420 ms"], [0.9996, "1.0 s"], [9.94, "9.9 s"], [9.96, "10 s"], [59.6, "1 min"], [200, "3 min 20 s"], [3599.7, "1 h"],
  [7800, "2 h 10 min"], [86_399, "1 d"], [100 * 3600, "4 d 4 h"], [-3, "0 s"], [null, "–"],
])("duration(%s)", (seconds, text) => {
  expect(plain(duration(seconds))).toBe(text);
});

test("ages are short and rounded down", () => {
  expect([12.9, 59.9, 60, 3599, 3600, 90_000].map((s) => plain(brief(s)))).toEqual(["12 s", "59 s", "1 min", "59 min", "1 h", "1 d"]);
});

test("percentages, decimals and hours are rounded", () => {
  const shares = [0, 0.0004, 0.004, 0.094, 0.994, 0.995, 0.99999, 1, 1.2];
  expect(shares.map((r) => plain(percent(r)))).toEqual(["0 %", "<0.1 %", "0.4 %", "9.4 %", "99 %", "99.5 %", "99.9 %", "100 %", "120 %"]);
  expect(decimals(1.23456, 3)).toBe("1.235");
  expect(plain(hours(1440))).toBe("24 min");
  expect(plain(hours(5400))).toBe("1.5 h");
  expect(plain(hours(360_000))).toBe("100 h");
});

test("many() uses the singular for one", () => {
  expect([0, 1, 2, 1200].map((n) => plain(many(n, "token")))).toEqual(["0 tokens", "1 token", "2 tokens", "1.20 k tokens"]);
});

test("axis labels have no trailing zeros", () => {
  const marks = ["0", "15.0 k", "5.00 k", "2.50 M", "100 %", "0.5", "20", "1.05 kB/s", "10"];
  expect(marks.map(bare)).toEqual(["0", "15 k", "5 k", "2.5 M", "100 %", "0.5", "20", "1.05 kB/s", "10"]);
});

// vite.config.ts sets the zone: Europe/Berlin puts its clocks forward on 29 March and back on 25 October 2026.

test.each([
  ["an ordinary night", "2026-11-22T15:00:00+01:00", "2026-11-23T07:00:00.000Z"],
  ["a night that is an hour shorter", "2026-03-28T20:00:00+01:00", "2026-03-29T06:00:00.000Z"],
  ["a night that is an hour longer", "2026-10-24T20:00:00+02:00", "2026-10-25T07:00:00.000Z"],
  ["the day before the month's end", "2026-11-30T23:59:00+01:00", "2026-12-01T07:00:00.000Z"],
  ["after midnight", "2026-11-22T00:30:00+01:00", "2026-11-23T07:00:00.000Z"],
])("tomorrow at eight: %s", (_, now, then) => {
  expect(tomorrowAt(new Date(now), 8).toISOString()).toBe(then);
});

test("times are relative to today", () => {
  const now = Date.parse("2026-11-22T15:00:00+01:00");
  expect(soon(Date.parse("2026-11-22T22:00:00+01:00"), now)).toBe("22:00");
  expect(soon(Date.parse("2026-11-23T08:00:00+01:00"), now)).toBe("tomorrow 08:00");
  expect(soon(Date.parse("2026-11-25T08:00:00+01:00"), now)).toMatch(/25 Nov/);
});

test("a past time names its day unless it is today", () => {
  const now = Date.parse("2026-11-22T15:00:00+01:00");
  expect(clockWithSeconds(Date.parse("2026-11-22T08:00:05+01:00"), now)).toBe("08:00:05");
  expect(clockWithSeconds(Date.parse("2026-11-21T08:00:05+01:00"), now)).toBe("Sat 21 Nov, 08:00:05");
});

test("invalid times are null", () => {
  expect(moment("2026-11-22T15:00:00.000Z")).toBe(1_795_359_600_000);
  expect([moment(""), moment(null), moment("soon")]).toEqual([null, null, null]);
});

test.each([[1, "1st"], [2, "2nd"], [3, "3rd"], [4, "4th"], [11, "11th"], [12, "12th"], [13, "13th"], [21, "21st"], [113, "113th"]])(
  "rank %i is %s",
  (rank, text) => {
    expect(ordinal(rank)).toBe(text);
  },
);

test("the time left has one unit and a date", () => {
  const now = new Date(2026, 10, 25, 12, 0).getTime();
  const left = (hours: number) => timeLeft(new Date(now + hours * 3_600_000).toISOString(), now);
  expect(left(0.5)).toBe("Less than an hour left.");
  expect(left(1.2)).toBe("About 1 hour left, until 13:12.");
  expect(left(20)).toBe("About 20 hours left, until tomorrow 08:00.");
  expect(left(24 * 5)).toBe("About 5 days left, until 30 November.");
  expect(left(24 * 60)).toBe("About 9 weeks left, until 24 January 2027.");
  expect(left(24 * 365 * 3)).toBe("About 3 years left, at the present speed.");
  expect(timeLeft(null, now)).toBe("The time left is known after some rounds.");
});

test.each([[0, "0 Wh"], [900, "under 1 Wh"], [1_260_000, "350 Wh"], [4_464_000, "1.24 kWh"], [3.6e9, "1.00 MWh"], [null, "–"]])("energy(%s)", (joules, text) => {
  expect(plain(energy(joules))).toBe(text);
});
