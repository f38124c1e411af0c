import { expect, test } from "vitest";
import type { RoundRecord } from "../src/api/types";
import { attendance, presence, ROWS_MAX } from "../src/live/attendance";

const round = (...members: [id: string, included?: boolean, name?: string][]) =>
  ({ members: members.map(([peer_id, included = true, name = peer_id]) => ({ peer_id, name, included, weight: 1 })) }) as RoundRecord;

test("whoever was in most rounds comes first, under the newest name, and rows do not jump", () => {
  const records = [round(["b", true, "new"], ["c"]), round(["a"], ["b", true, "old"]), round(["a"], ["b"])];
  expect(attendance(records).peers).toEqual([
    { peer_id: "b", name: "new" },
    { peer_id: "a", name: "a" },
    { peer_id: "c", name: "c" },
  ]);
});

test("in, left out, and not there are three things", () => {
  const record = round(["a"], ["b", false]);
  expect(["a", "b", "c"].map((peer) => presence(record, peer))).toEqual(["in", "out", "away"]);
});

test("a crowd is counted", () => {
  const many = Array.from({ length: ROWS_MAX + 1 }, (_, at) => [`p${at}`] as [string]);
  expect(attendance([round(...many)]).crowded).toBe(true);
  expect(attendance([round(...many.slice(1))]).crowded).toBe(false);
  expect(attendance([]).peers).toEqual([]);
});
