/** What the page knows at this moment, as signals, and the feed that fills them. */

import { computed, effect, signal } from "@preact/signals";
import { api, Refused } from "../api/client";
import type { Status } from "../api/types";
import { cleanName } from "../words/clean";
import { describe } from "../words/states";
import { Feed, type Link } from "./feed";

export const status = signal<Status | null>(null);
export const link = signal<Link>("opening");
/** When this page last heard from the node, by the page's clock, ms. */
export const heardAt = signal<number | null>(null);
/** The present moment for ages and countdowns, ms; moves once a second while the tab is looked at. */
export const now = signal(Date.now());
export const visible = signal(!document.hidden);

/** News older than this is shown grey, with its age. */
const STALE_S = 12;

export const ageS = computed(() => (heardAt.value === null ? 0 : Math.max(0, (now.value - heardAt.value) / 1000)));
/** Right after a sleep the first answer is on its way: old news is no fault of the node then. */
export const stale = computed(() => {
  if (status.value === null || link.value === "opening" || link.value === "asleep") return false;
  return link.value === "lost" || ageS.value > STALE_S;
});
export const state = computed(() => describe(status.value));
export const NO_ANSWER = "No answer";
/** How it is, in one or two words. That a node which has ended does not answer is no news. */
export const word = computed(() => (stale.value && !status.value?.final ? NO_ANSWER : state.value.word));
/** Changes when the node may have been another process since: views that hold lists ask anew. */
export const reconnects = signal(0);

const feed = new Feed(
  {
    openStream(onStatus, onFailure) {
      const source = new EventSource("/api/v1/events");
      source.addEventListener("status", (event) => onStatus(JSON.parse(event.data as string) as Status));
      source.addEventListener("error", onFailure);
      return source;
    },
    ask: api.status,
    isLocked: (error) => error instanceof Refused && error.locked,
    now: Date.now,
    later: (run, ms) => setTimeout(run, ms),
    cancel: (timer) => clearTimeout(timer as number),
  },
  (news) => {
    const before = status.peek();
    // Where the tab was hidden meanwhile no link was lost: only its start tells another process.
    if (before && before.node.started_at !== news.node.started_at) reconnects.value += 1;
    status.value = news;
  },
  (next, heard) => {
    if (next !== "lost" && link.peek() === "lost") reconnects.value += 1;
    link.value = next;
    heardAt.value = heard;
  },
);

export function start(): void {
  let ticking: ReturnType<typeof setInterval> | undefined;
  const look = () => {
    visible.value = !document.hidden;
    clearInterval(ticking);
    if (document.hidden) {
      feed.sleep();
      return;
    }
    now.value = Date.now();
    ticking = setInterval(() => {
      now.value = Date.now();
    }, 1000);
    feed.wake();
  };
  document.addEventListener("visibilitychange", look);
  look();
  effect(showOutside);
}

/** After a login. */
export function unlock(): void {
  feed.wake();
}

/** The parts of the state that lie outside the page's body: title, and the phase that style sheets and tests read. */
function showOutside(): void {
  const { dataset } = document.documentElement;
  const name = status.value?.node.name;
  document.title = `${link.value === "locked" ? "Locked" : word.value} · ${name ? cleanName(name, 40) : "diloco-node"}`;
  dataset["phase"] = link.value === "locked" ? "locked" : (status.value?.phase ?? "unknown");
  dataset["code"] = status.value?.code ?? "";
  dataset["stale"] = String(stale.value);
}
