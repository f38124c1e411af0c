/** The charts of a view, the range that they share, and one history request for all of them. */

import { signal, Signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { api, ApiError } from "../api/client";
import type { History } from "../api/schema";
import type { ChartSpec } from "../components/chart-options";
import { Chart } from "../components/chart";
import { Section } from "../components/text";
import { EMPTY, POINTS, type Range, RANGES, refreshMs, startOf } from "../state/history";
import { reconnects, usePolling } from "../state/store";

export function Charts({ specs }: { specs: ChartSpec[] }) {
  const { history, absent } = useHistory();
  return (
    <Section title="History" id="history" aside={<Ranges />}>
      {absent ? (
        <p class="plain">This version of the node keeps no history.</p>
      ) : (
        <div class="charts" data-testid="charts">
          {specs.map((spec) => (
            <Chart key={spec.id} spec={spec} history={history ?? EMPTY} />
          ))}
        </div>
      )}
    </Section>
  );
}

function Ranges() {
  return (
    <fieldset class="ranges">
      <legend class="unseen">Range of the charts</legend>
      {RANGES.map((one) => (
        <label key={one.id} title={one.name}>
          <input
            type="radio"
            name="range"
            class="unseen"
            checked={range.value.id === one.id}
            onChange={() => {
              range.value = one;
            }}
          />
          <span>{one.label}</span>
        </label>
      ))}
    </fieldset>
  );
}

export const range = signal<Range>(RANGES[0]);

export interface Charts {
  history: History | null;
  /** Whether the node keeps no history. */
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
      try {
        const fresh = await api.history(new Date(startOf(wanted, Date.now() / 1000) * 1000).toISOString(), POINTS);
        if (range.peek() !== wanted) return 0;
        have.value = fresh;
        absent.value = false;
      } catch (error) {
        absent.value = error instanceof ApiError && error.status === 404;
        throw error;
      }
      return refreshMs(have.peek());
    },
    10_000,
    [id, reconnects.value],
  );
  return { history: have.value, absent: absent.value };
}
