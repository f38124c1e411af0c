/** Time series of the charts: which range to request, and how to merge new points. Pure functions. */

import type { History } from "../api/schema";

export const RANGES = [
  { id: "1h", label: "1 h", name: "Last hour", seconds: 3_600 },
  { id: "24h", label: "24 h", name: "Last 24 hours", seconds: 86_400 },
  { id: "7d", label: "7 d", name: "Last 7 days", seconds: 7 * 86_400 },
  { id: "all", label: "All", name: "Since the node was created", seconds: null },
] as const;
export type Range = (typeof RANGES)[number];

export const POINTS = 240;
export const EMPTY: History = { step_s: 0, at_s: [], series: {} };

export interface HistoryRequest {
  /** Unix seconds. */
  since: number;
  points: number;
  /** Whether the answer replaces the existing points. */
  whole: boolean;
}

/** Start of a range, unix seconds. "All" starts at 0, to which the node answers from its oldest row. */
export function startOf(range: Range, now: number): number {
  return range.seconds === null ? 0 : now - range.seconds;
}

/** The next request: from the last point, which may still change, or the whole range. */
export function nextRequest(have: History | null, range: Range, now: number): HistoryRequest {
  const last = have?.at_s.at(-1);
  if (!have || last === undefined || !have.step_s || have.at_s.length > 2 * POINTS || now - last > 20 * have.step_s) {
    return { since: startOf(range, now), points: POINTS, whole: true };
  }
  return { since: last, points: Math.max(2, Math.ceil((now - last) / have.step_s) + 1), whole: false };
}

/** Replaces the points of `have` from the first time of `fresh`, and drops those before `since`. */
export function merge(have: History, fresh: History, since: number): History {
  const from = fresh.at_s[0] ?? Number.POSITIVE_INFINITY;
  const first = lowerBound(have.at_s, since);
  const end = Math.max(first, lowerBound(have.at_s, from));
  const kept = end - first;
  const series: History["series"] = {};
  for (const name of new Set([...Object.keys(have.series), ...Object.keys(fresh.series)])) {
    const old = have.series[name]?.slice(first, end) ?? nulls(kept);
    series[name] = old.concat(fresh.series[name] ?? nulls(fresh.at_s.length));
  }
  return { step_s: have.step_s || fresh.step_s, at_s: have.at_s.slice(first, end).concat(fresh.at_s), series };
}

/** Whether two histories are equal. */
export function same(a: History, b: History): boolean {
  return a.at_s.length === b.at_s.length && JSON.stringify(a) === JSON.stringify(b);
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

/** Index of the first element that is not below `value`. */
function lowerBound(sorted: number[], value: number): number {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((sorted[middle] as number) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
