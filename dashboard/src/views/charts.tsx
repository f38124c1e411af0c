/** The charts of a view, the range that they share, and one history request for all of them. */

import { signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { api } from "../api/client";
import type { History } from "../api/schema";
import type { ChartSpec } from "../components/chart-options";
import { Chart } from "../components/chart";
import { Section } from "../components/text";
import { POINTS, type Range, RANGES, refreshMs, startOf } from "../state/history";
import { reconnects, usePolling } from "../state/store";

export function Charts({ specs }: { specs: ChartSpec[] }) {
  const history = useSignal<History | null>(null);
  const { id } = range.value;
  useEffect(() => {
    history.value = null;
  }, [id]);
  const fault = usePolling(
    async () => {
      const wanted = range.peek();
      const fresh = await api.history(new Date(startOf(wanted, Date.now() / 1000) * 1000).toISOString(), POINTS);
      if (range.peek() !== wanted) return 0;
      history.value = fresh;
      return refreshMs(fresh);
    },
    10_000,
    [id, reconnects.value],
  );
  return (
    <Section title="History" id="history" aside={<Ranges />}>
      {fault && <p class="plain">{fault}</p>}
      {(history.value !== null || !fault) && (
        <div class="charts" data-testid="charts">
          {specs.map((spec) => (
            <Chart key={spec.id} spec={spec} history={history.value} />
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
