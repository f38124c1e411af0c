import { expect, test } from "vitest";
import { formatHours, parseHours, week, zoneNote } from "../src/format/weekly-hours";

test.each(["mon-fri 22:00-08:00", "sat,sun 00:00-24:00", "mon 09:00-17:30", "mon,wed,fri-sun 00:00-01:00"])("%s survives parsing and formatting", (text) => {
  const hours = parseHours(text);
  expect(hours && formatHours(hours)).toBe(text);
});

test("day ranges may cross the end of the week; other spellings are normalised", () => {
  expect(parseHours("Sat-Mon 8:00 - 9:00")).toEqual({ days: [0, 5, 6], from: "08:00", to: "09:00" });
});

test.each(["", "mon", "funday 10:00-11:00", "mon 25:00-26:00", "mon 10:00-24:30", "mon-tue-wed 10:00-11:00", "10:00-11:00"])(
  "%s is not parsed",
  (text) => {
    expect(parseHours(text)).toBeNull();
  },
);

test("a span over midnight is split between both days", () => {
  const spans = week([{ days: [6], from: "22:30", to: "08:00" }]);
  expect(spans[6]).toEqual([[22.5, 24]]);
  expect(spans[0]).toEqual([[0, 8]]);
  expect(week([{ days: [1], from: "22:00", to: "24:00" }])[2]).toEqual([]);
  expect(week([{ days: [1], from: "08:00", to: "08:00" }])[2]).toEqual([[0, 8]]);
});

test("hours name their time zone, and that of the browser if it is another one", () => {
  expect(zoneNote("Europe/Berlin", "Europe/Berlin")).toBe("Times are in Europe/Berlin.");
  expect(zoneNote("Etc/UTC", "UTC")).toBe("Times are in Etc/UTC.");
  expect(zoneNote("Europe/Berlin", "Asia/Tokyo")).toBe("Times are in Europe/Berlin. This browser is in Asia/Tokyo.");
  expect(zoneNote("machine", "UTC")).toBe("Times are in the time zone of the node's machine. This browser is in UTC.");
});
