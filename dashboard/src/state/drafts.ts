/** Settings that the user has changed but not saved. They outlive a change of view, a reload, and are the same in all tabs. */

import { signal } from "@preact/signals";
import type { Json } from "../api/client";

export type Drafts = Record<string, Json>;
const KEY = "diloco-drafts";

export function parseDrafts(text: string | null): Drafts {
  try {
    const found: unknown = JSON.parse(text ?? "{}");
    return found !== null && typeof found === "object" && !Array.isArray(found) ? (found as Drafts) : {};
  } catch {
    return {};
  }
}

function stored(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** Changed values by dotted key. */
export const drafts = signal<Drafts>(parseDrafts(stored()));

export function setDrafts(next: Drafts): void {
  drafts.value = next;
  try {
    if (Object.keys(next).length) localStorage.setItem(KEY, JSON.stringify(next));
    else localStorage.removeItem(KEY);
  } catch {
    // Without storage the drafts last until the page is closed.
  }
}

/** Takes over what another tab has changed. */
export function watchDrafts(): void {
  addEventListener("storage", (event) => {
    if (event.key === KEY || event.key === null) drafts.value = parseDrafts(stored());
  });
}
