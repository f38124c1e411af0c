/** The user's choice of browser notifications, and the watch that sends them, also while the tab is hidden. */

import { effect, signal } from "@preact/signals";
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

export function startNotifications(): void {
  const watch = new AlertWatch();
  const look = (news: Status | null) => {
    for (const alert of watch.next(news, Date.now())) notify(status.peek()?.node.name ?? "diloco-node", alert);
  };
  const isOn = () => enabled.value && permission.value === "granted";
  effect(() => {
    if (!isOn() || !visible.value || link.value === "locked" || link.value === "opening") return;
    void now.value; // Once a second, because alerts are told after some time.
    if (link.value === "lost") look(null);
    else if (status.value) look(status.value);
  });
  // A hidden tab has no event stream. It asks once a minute, and again soon if something is new.
  effect(() => {
    if (!isOn() || visible.value || link.peek() === "locked") return;
    const timer = setInterval(() => {
      // A node that refuses the session does answer.
      api.status().then(look, (error: unknown) => error instanceof ApiError || look(null));
    }, HIDDEN_MS);
    return () => clearInterval(timer);
  });
}
