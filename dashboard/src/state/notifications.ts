/** The user's choice of browser notifications, and the watch that sends them, also while the tab is hidden.
 *
 * Of all tabs of the page one tells. What was told is kept in the browser, so a reload or another tab does not repeat it.
 */

import { computed, effect, signal } from "@preact/signals";
import { api, ApiError } from "../api/client";
import type { Status } from "../api/schema";
import { AlertWatch, HIDDEN_MS, notify } from "./alerts";
import { link, now, status, visible } from "./store";

const KEY = "diloco-notify";

export type Permission = "unsupported" | NotificationPermission;

function wanted(): boolean {
  try {
    return localStorage.getItem(KEY) === "on";
  } catch {
    return false;
  }
}

const permitted = (): Permission => (isSecureContext && "Notification" in window ? Notification.permission : "unsupported");

/** Whether the user wants notifications in this browser. */
export const enabled = signal(wanted());
export const permission = signal<Permission>(permitted());

/** Asks the browser for permission if needed. Call it from a click. */
export async function enable(on: boolean): Promise<void> {
  if (on && permitted() === "default") await Notification.requestPermission();
  permission.value = permitted();
  enabled.value = on && permission.value === "granted";
  try {
    if (enabled.value) localStorage.setItem(KEY, "on");
    else localStorage.removeItem(KEY);
  } catch {
    // Without storage the choice lasts until the page is closed.
  }
}

/** The name of what is kept about one node. A tunnel may show several nodes under one address. */
const toldKey = (peer: string): string => `diloco-told-${peer}`;

function readTold(peer: string): string[] {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(toldKey(peer)) ?? "[]");
    return Array.isArray(found) ? found.filter((key) => typeof key === "string") : [];
  } catch {
    return [];
  }
}

/** Calls `tell(true)` as soon as no other tab holds the lock, and `tell(false)` at the end. Returns what ends it. */
function holdLock(tell: (isHeld: boolean) => void): () => void {
  const waiting = new AbortController();
  let release = () => {};
  const held = navigator.locks.request(KEY, { signal: waiting.signal }, () => {
    tell(true);
    return new Promise<void>((resolve) => (release = resolve));
  });
  held.catch(() => {}); // The wait was ended.
  return () => {
    waiting.abort();
    release();
    tell(false);
  };
}

export function startNotifications(): void {
  let watch = new AlertWatch();
  let peer = "";
  let kept = "";
  const look = (news: Status | null) => {
    const { peer_id, name } = (news ?? status.peek())?.node ?? { peer_id: peer, name: "diloco-node" };
    if (peer_id !== peer) {
      peer = peer_id;
      watch = new AlertWatch(readTold(peer));
    }
    for (const alert of watch.next(news, Date.now())) notify(name, alert);
    const told = JSON.stringify([...watch.told]);
    if (told === kept) return;
    kept = told;
    try {
      localStorage.setItem(toldKey(peer), told);
    } catch {
      // Without storage a reload repeats a lasting alert.
    }
  };
  const isWanted = computed(() => enabled.value && permission.value === "granted" && link.value !== "locked");
  const isTeller = signal(false);
  const isOn = () => isWanted.value && isTeller.value;
  effect(() => (isWanted.value ? holdLock((isHeld) => (isTeller.value = isHeld)) : undefined));
  effect(() => {
    if (!isOn() || !visible.value || link.value === "opening") return;
    void now.value; // Once a second, because alerts are told after some time.
    if (link.value === "lost") look(null);
    else if (status.value) look(status.value);
  });
  // A hidden tab has no event stream. It asks once a minute.
  effect(() => {
    if (!isOn() || visible.value) return;
    const timer = setInterval(() => {
      // A node that refuses the session does answer.
      api.status().then(look, (error: unknown) => error instanceof ApiError || look(null));
    }, HIDDEN_MS);
    return () => clearInterval(timer);
  });
}
