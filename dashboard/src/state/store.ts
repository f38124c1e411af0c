/** The state of the page as signals, and the feed that updates them. */

import { computed, effect, signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { api, ApiError, errorText } from "../api/client";
import type { Status } from "../api/schema";
import { cleanName } from "../format/sanitize";
import { describe } from "../format/status-text";
import { Feed, type Link } from "./feed";
import { Steady } from "./steady";

/** The node's newest status, as the page shows it. */
export const status = signal<Status | null>(null);
const steady = new Steady();
/** The node's newest status as it came. */
let newest: Status | null = null;
export const link = signal<Link>("opening");
/** When the page last received data from the node, in ms of the page's clock. */
export const receivedAt = signal<number | null>(null);
/** The current time for ages and countdowns, ms; updated once a second while the tab is visible. */
export const now = signal(Date.now());
export const visible = signal(!document.hidden);

/** Data older than this is shown in grey, with its age. */
const STALE_S = 12;

export const ageS = computed(() => (receivedAt.value === null ? 0 : Math.max(0, (now.value - receivedAt.value) / 1000)));
/** Whether the data is too old. Right after a hidden tab is shown it is not, because the first answer is on its way. */
export const stale = computed(() => {
  if (status.value === null || link.value === "opening" || link.value === "asleep") return false;
  return link.value === "lost" || ageS.value > STALE_S;
});
export const state = computed(() => describe(status.value));
export const OFFLINE = "Offline";
/** The state in one or two words. A node that has ended is not expected to answer. */
export const word = computed(() => (stale.value && !status.value?.final ? OFFLINE : state.value.word));
/** Increases when the node may have restarted. Views that hold lists then reload them. */
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
    isLocked: (error) => error instanceof ApiError && error.locked,
    now: Date.now,
    later: (run, ms) => setTimeout(run, ms),
    cancel: (timer) => clearTimeout(timer as number),
  },
  (news) => {
    const before = status.peek();
    // A hidden tab does not notice a lost link, so only the start time shows that the node has restarted.
    if (before && before.node.started_at !== news.node.started_at) reconnects.value += 1;
    newest = news;
    status.value = steady.next(news, Date.now());
  },
  (next, heard) => {
    if (next !== "lost" && link.peek() === "lost") reconnects.value += 1;
    link.value = next;
    receivedAt.value = heard;
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
      // A sync may by now have lasted long enough to be shown.
      if (newest?.phase === "syncing" && status.peek()?.phase !== "syncing") status.value = steady.next(newest, Date.now());
    }, 1000);
    feed.wake();
  };
  document.addEventListener("visibilitychange", look);
  look();
  effect(showOutside);
}

/** Resumes the feed after a login. */
export function unlock(): void {
  feed.wake();
}

/** Updates the document title and the data attributes that style sheets and tests read. */
function showOutside(): void {
  const { dataset } = document.documentElement;
  const name = status.value?.node.name;
  document.title = `${link.value === "locked" ? "Locked" : word.value} · ${name ? cleanName(name, 40) : "diloco-node"}`;
  dataset["phase"] = link.value === "locked" ? "locked" : (status.value?.phase ?? "unknown");
  dataset["code"] = status.value?.code ?? "";
  dataset["stale"] = String(stale.value);
}

/** Runs `ask` now and `ms` after each end, while the tab is visible and unlocked. A change of `again` restarts it.
 *
 * Returns a sentence if the last request has failed, else "".
 */
export function usePolling(ask: () => Promise<number | void>, ms: number, again: unknown[]): string {
  const fault = useSignal("");
  const awake = visible.value && link.value !== "locked";
  useEffect(() => {
    if (!awake) return;
    let timer: ReturnType<typeof setTimeout>;
    let ended = false;
    const round = async () => {
      let next: number | void = undefined;
      let problem = "";
      try {
        next = await ask();
      } catch (error) {
        problem = errorText(error);
      }
      if (ended) return;
      fault.value = problem;
      timer = setTimeout(round, next ?? ms);
    };
    void round();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [awake, ...again]);
  return fault.value;
}
