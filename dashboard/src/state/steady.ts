/** Keeps the state word steady: a sync that lasts a moment, as in every round, does not interrupt "Training". */

import type { Status } from "../api/schema";

/** A sync that takes longer than this is shown as one. */
export const STEADY_MS = 3_000;

export class Steady {
  private shown: Status | null = null;
  private syncFrom: number | null = null;

  /** The status to show for the newest status at `now`, ms. */
  next(news: Status, now: number): Status {
    const before = this.shown?.phase === "training" ? this.shown : null;
    const isSync = news.phase === "syncing" && news.code === "syncing";
    this.syncFrom = isSync ? (this.syncFrom ?? now) : null;
    let shown = news;
    if (before && this.syncFrom !== null && now - this.syncFrom < STEADY_MS) {
      const { phase, code, reason, since } = before;
      shown = { ...news, phase, code, reason, since };
    }
    this.shown = shown;
    return shown;
  }
}
