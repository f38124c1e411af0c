/** The history that the charts of a view share: one request for all of them, and only what is new. */

import { signal, useSignal, type Signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { api, Refused } from "../api/client";
import type { History } from "../api/types";
import { merge, question, RANGES, type Range, refreshMs, same, startOf } from "./history";
import { usePolling } from "./poll";
import { reconnects } from "./store";

export const range = signal<Range>(RANGES[0]);

export interface Charts {
  history: History | null;
  /** This node keeps none. */
  absent: boolean;
}

export function useHistory(): Charts {
  const have: Signal<History | null> = useSignal(null);
  const absent = useSignal(false);
  const { id } = range.value;

  useEffect(() => {
    have.value = null;
  }, [id]);

  usePolling(
    async () => {
      const wanted = range.peek();
      const asked = question(have.peek(), wanted, Date.now() / 1000);
      try {
        const fresh = await api.history(new Date(asked.since * 1000).toISOString(), asked.points);
        if (range.peek() !== wanted) return 0;
        const old = have.peek();
        const next = asked.whole || !old ? fresh : merge(old, fresh, startOf(wanted, Date.now() / 1000));
        if (!old || !same(old, next)) have.value = next;
        absent.value = false;
      } catch (error) {
        absent.value = error instanceof Refused && error.status === 404;
        throw error;
      }
      return refreshMs(have.peek());
    },
    10_000,
    [id, reconnects.value],
  );
  return { history: have.value, absent: absent.value };
}
