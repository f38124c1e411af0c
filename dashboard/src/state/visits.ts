/** What the node has done since its owner last looked at the page. */

import { effect, signal } from "@preact/signals";
import type { Status } from "../api/schema";
import { status, visible } from "./store";

const KEY = "diloco-visit";
/** The page was closed or hidden for this long if the owner was away, ms. */
export const ABSENCE_MS = 10 * 60_000;
const SAVE_MS = 30_000;

/** The counters of a node at a time. */
export interface Visit {
  peer: string;
  /** When the page was last seen, ms since the epoch. */
  at: number;
  tokens: number;
  merged: number;
  rounds: number;
}

export function visitOf({ node, contribution }: Pick<Status, "node" | "contribution">, at: number): Visit {
  const { tokens_total: tokens, tokens_merged: merged, rounds_joined: rounds } = contribution;
  return { peer: node.peer_id, at, tokens, merged, rounds };
}

export function parseVisit(text: string | null): Visit | null {
  try {
    const found = JSON.parse(text ?? "null") as Partial<Visit> | null;
    const isWhole = found && typeof found.peer === "string" && [found.at, found.tokens, found.merged, found.rounds].every(Number.isFinite);
    return isWhole ? (found as Visit) : null;
  } catch {
    return null;
  }
}

/** Whether the owner was away between two visits to the same node. */
export function wasAway(before: Visit | null, now: Visit): boolean {
  return before !== null && before.peer === now.peer && before.tokens <= now.tokens && now.at - before.at >= ABSENCE_MS;
}

/** What a node has done since a visit. */
export interface Work {
  seconds: number;
  tokens: number;
  merged: number;
  rounds: number;
}

export function workSince(before: Visit, now: Visit): Work {
  const more = (name: "tokens" | "merged" | "rounds") => Math.max(0, now[name] - before[name]);
  return { seconds: (now.at - before.at) / 1000, tokens: more("tokens"), merged: more("merged"), rounds: more("rounds") };
}

/** The last visit before the owner was away; null if the owner was not. */
export const lastVisit = signal<Visit | null>(null);

/** Notes the counters while the page is visible, and notices an absence when it is seen again. */
export function watchVisits(): void {
  let last: Visit | null = null;
  try {
    last = parseVisit(localStorage.getItem(KEY));
  } catch {
    // Without storage an absence is noticed only while the page is open.
  }
  let savedAt = 0;
  effect(() => {
    const own = status.value;
    if (!own?.node.peer_id || !visible.value) return;
    const visit = visitOf(own, Date.now());
    if (last && wasAway(last, visit)) lastVisit.value = last;
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
