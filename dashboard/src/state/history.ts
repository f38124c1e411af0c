/** Time series of the charts: their ranges and columns. Pure functions. */

import type { History } from "../api/schema";

export const RANGES = [
  { id: "1h", label: "1 h", name: "Last hour", seconds: 3_600 },
  { id: "24h", label: "24 h", name: "Last 24 hours", seconds: 86_400 },
  { id: "7d", label: "7 d", name: "Last 7 days", seconds: 7 * 86_400 },
  { id: "all", label: "All", name: "Since the node was created", seconds: null },
] as const;
export type Range = (typeof RANGES)[number];

/** Most points of a chart. All of them have the same distance, so each request is for the whole range. */
export const POINTS = 240;
export const EMPTY: History = { step_s: 0, at_s: [], series: {} };

/** Start of a range, unix seconds. "All" starts at 0, to which the node answers from its oldest row. */
export function startOf(range: Range, now: number): number {
  return range.seconds === null ? 0 : now - range.seconds;
}

/** Time until the next point can exist: ten seconds or more. */
export function refreshMs(have: History | null): number {
  return Math.min(300, Math.max(10, have?.step_s ?? 10)) * 1000;
}

/** Cumulative sums of the columns. A time without any known value stays unknown. */
export function stack(columns: (number | null)[][]): (number | null)[][] {
  const length = columns[0]?.length ?? 0;
  const sums = columns.map(() => nulls(length));
  for (let at = 0; at < length; at += 1) {
    if (columns.every((column) => column[at] == null)) continue;
    let sum = 0;
    columns.forEach((column, row) => {
      sum += column[at] ?? 0;
      (sums[row] as (number | null)[])[at] = sum;
    });
  }
  return sums;
}

/** The newest known value. */
export function newest(column: (number | null)[] | undefined): number | null {
  for (let at = (column?.length ?? 0) - 1; at >= 0; at -= 1) {
    const value = column?.[at];
    if (value != null) return value;
  }
  return null;
}

function nulls(length: number): (number | null)[] {
  return new Array<number | null>(length).fill(null);
}
