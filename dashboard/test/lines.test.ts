import { expect, test } from "vitest";
import type { LogLine } from "../src/api/types";
import { appended, LINES_MAX, matches } from "../src/live/lines";

const line = (id: number, message = "Round 3: complete", logger = "node.worker.trainer"): LogLine => ({
  id, message, logger, at: "2026-11-22T00:00:00Z", level: "info", round: 3,
});

test("each line once, and never more than the page can bear", () => {
  expect(appended([line(1), line(2)], [line(2), line(3)]).map(({ id }) => id)).toEqual([1, 2, 3]);
  const many = Array.from({ length: LINES_MAX }, (_, id) => line(id));
  const next = appended(many, [line(LINES_MAX)]);
  expect(next).toHaveLength(LINES_MAX);
  expect(next.at(-1)?.id).toBe(LINES_MAX);
});

test("search looks at message and logger, in any case", () => {
  expect([matches(line(1), "COMPLETE"), matches(line(1), "Trainer"), matches(line(1), "absent"), matches(line(1), "")]).toEqual([
    true, true, false, true,
  ]);
});
