import { expect, test } from "vitest";
import type { LogLine, RoundRecord } from "../src/api/schema";
import { appendLines, participants, LINES_MAX, presence, ROWS_MAX } from "../src/state/records";

const round = (...members: [id: string, included?: boolean, name?: string][]) =>
  ({ members: members.map(([peer_id, included = true, name = peer_id]) => ({ peer_id, name, included, weight: 1 })) }) as RoundRecord;

test("peers are ordered by number of rounds and shown with their newest name", () => {
  const records = [round(["b", true, "new"], ["c"]), round(["a"], ["b", true, "old"]), round(["a"], ["b"])];
  expect(participants(records).peers).toEqual([
    { peer_id: "b", name: "new" },
    { peer_id: "a", name: "a" },
    { peer_id: "c", name: "c" },
  ]);
});

test("a peer is included, left out or absent", () => {
  const record = round(["a"], ["b", false]);
  expect(["a", "b", "c"].map((peer) => presence(record, peer))).toEqual(["in", "out", "away"]);
});

test("more than ROWS_MAX peers are shown as counts", () => {
  const many = Array.from({ length: ROWS_MAX + 1 }, (_, at) => [`p${at}`] as [string]);
  expect(participants([round(...many)]).crowded).toBe(true);
  expect(participants([round(...many.slice(1))]).crowded).toBe(false);
  expect(participants([]).peers).toEqual([]);
});

const line = (id: number, message = "Round 3: complete", logger = "node.worker.trainer"): LogLine => ({
  id, message, logger, at: "2026-11-22T00:00:00Z", level: "info", round: 3, phase: "training",
});

test("log lines are appended once and limited to LINES_MAX", () => {
  expect(appendLines([line(1), line(2)], [line(2), line(3)]).map(({ id }) => id)).toEqual([1, 2, 3]);
  const many = Array.from({ length: LINES_MAX }, (_, id) => line(id));
  const next = appendLines(many, [line(LINES_MAX)]);
  expect(next).toHaveLength(LINES_MAX);
  expect(next.at(-1)?.id).toBe(LINES_MAX);
});
