/** Log lines: which to show, and how many. Pure. */

import type { LogLine } from "../api/types";

/** The page holds no more than this; the file in the data folder has them all. */
export const LINES_MAX = 1_500;

export function appended(have: LogLine[], fresh: LogLine[]): LogLine[] {
  const last = have.at(-1)?.id ?? -1;
  return have.concat(fresh.filter((line) => line.id > last)).slice(-LINES_MAX);
}

/** What the node does with `search=`, for one that does not know it yet. */
export function matches(line: LogLine, search: string): boolean {
  const wanted = search.toLowerCase();
  return line.message.toLowerCase().includes(wanted) || line.logger.toLowerCase().includes(wanted);
}
