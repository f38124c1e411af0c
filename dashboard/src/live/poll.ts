/** Views that ask again every so often while they are looked at. */

import { useEffect } from "preact/hooks";
import { link, visible } from "./store";

/** Runs `ask` now and again `ms` after each end, while the tab is visible and open; `again` restarts it. */
export function usePolling(ask: () => Promise<number | void>, ms: number, again: unknown[]): void {
  const awake = visible.value && link.value !== "locked";
  useEffect(() => {
    if (!awake) return;
    let timer: ReturnType<typeof setTimeout>;
    let ended = false;
    const round = async () => {
      const next = await ask().catch(() => ms);
      if (!ended) timer = setTimeout(round, next ?? ms);
    };
    void round();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [awake, ...again]);
}
