/** When the owner last looked at the page, if that is longer ago than a moment. */

import { effect, signal } from "@preact/signals";
import { now, status, visible } from "./store";

const KEY = "diloco-visit";
/** The page was closed or hidden for this long if the owner was away, ms. */
export const ABSENCE_MS = 10 * 60_000;
const SAVE_MS = 30_000;

/** The node whose page was seen, and when that was, ms since the epoch. */
export interface Visit {
  peer: string;
  at: number;
}

export function parseVisit(text: string | null): Visit | null {
  try {
    const found = JSON.parse(text ?? "null") as Partial<Visit> | null;
    return found && typeof found.peer === "string" && Number.isFinite(found.at) ? { peer: found.peer, at: found.at as number } : null;
  } catch {
    return null;
  }
}

/** Whether the owner was away between two visits to the same node. */
export function wasAway(before: Visit | null, now: Visit): boolean {
  return before !== null && before.peer === now.peer && now.at - before.at >= ABSENCE_MS;
}

/** The last visit before the owner was away, ms since the epoch; null if the owner was not. */
export const lastVisit = signal<number | null>(null);

/** The later one of two visits. */
export function later(one: Visit | null, other: Visit | null): Visit | null {
  return one === null || (other !== null && other.at > one.at) ? other : one;
}

function stored(): Visit | null {
  try {
    return parseVisit(localStorage.getItem(KEY));
  } catch {
    return null; // Without storage an absence is noticed only while the page is open.
  }
}

/** Notes the time while the page is visible, and notices an absence when it is seen again. */
export function watchVisits(): void {
  let last: Visit | null = null;
  let isSeen = false;
  let savedAt = 0;
  effect(() => {
    void now.value; // Once a second: an owner who sees a silent node is not away.
    const peer = status.value?.node.peer_id;
    if (!peer || !visible.value) {
      isSeen = false;
      return;
    }
    const visit = { peer, at: Date.now() };
    // The owner may have seen another tab meanwhile.
    if (!isSeen) last = later(last, stored());
    isSeen = true;
    if (last && wasAway(last, visit)) lastVisit.value = last.at;
    else if (last && last.peer !== visit.peer) lastVisit.value = null;
    last = visit;
    if (visit.at - savedAt < SAVE_MS) return;
    savedAt = visit.at;
    try {
      localStorage.setItem(KEY, JSON.stringify(visit));
    } catch {
      // See above.
    }
  });
}
