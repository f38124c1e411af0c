import { expect, test } from "vitest";
import { sorted, nextOrder } from "../src/components/table";

const rows = [{ n: 2 }, { n: null }, { n: 10 }, { n: 1 }];

test("unknown values come last in both directions", () => {
  expect(sorted(rows, (row) => row.n, false).map((row) => row.n)).toEqual([1, 2, 10, null]);
  expect(sorted(rows, (row) => row.n, true).map((row) => row.n)).toEqual([10, 2, 1, null]);
  expect(rows[0]).toEqual({ n: 2 });
});

test("names sort naturally and equal rows keep their order", () => {
  expect(sorted(["node-10", "node-9", "Node-1"], (name) => name, false)).toEqual(["Node-1", "node-9", "node-10"]);
  const equal = [{ id: 1, k: "a" }, { id: 2, k: "a" }];
  expect(sorted(equal, (row) => row.k, true).map((row) => row.id)).toEqual([1, 2]);
  expect(sorted([true, false], (value) => value, false)).toEqual([false, true]);
});

test("the same column reverses; another starts in its default direction", () => {
  expect(nextOrder({ column: "a", descending: false }, "a", true)).toEqual({ column: "a", descending: true });
  expect(nextOrder({ column: "a", descending: false }, "b", true)).toEqual({ column: "b", descending: true });
});
