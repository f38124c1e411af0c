/** Settings of one node that the user has changed but not saved. They outlive a change of view, a reload, and are the same
 * in all tabs. */

import { effect, type ReadonlySignal, signal } from "@preact/signals";
import type { Json } from "../api/client";

export type Drafts = Record<string, Json>;

/** The node whose drafts these are; empty until it is known. A tunnel may show several nodes under one address. */
let node = "";
const key = () => `diloco-drafts-${node}`;

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
    return localStorage.getItem(key());
  } catch {
    return null;
  }
}

/** Changed values by dotted key. */
export const drafts = signal<Drafts>({});

export function setDrafts(next: Drafts): void {
  drafts.value = next;
  try {
    if (node && Object.keys(next).length) localStorage.setItem(key(), JSON.stringify(next));
    else localStorage.removeItem(key());
  } catch {
    // Without storage the drafts last until the page is closed.
  }
}

/** Loads the drafts of the node, and takes over what another tab has changed. `peer` is empty while a node starts. */
export function watchDrafts(peer: ReadonlySignal<string>): void {
  effect(() => {
    if (!peer.value || peer.value === node) return;
    const early = node ? {} : drafts.peek();
    node = peer.value;
    setDrafts({ ...parseDrafts(stored()), ...early });
  });
  addEventListener("storage", (event) => {
    if (event.key === key() || event.key === null) drafts.value = parseDrafts(stored());
  });
}
