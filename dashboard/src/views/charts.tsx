/** The charts of a view, with the range that they share. */

import { range, useHistory } from "../live/charts";
import { EMPTY, RANGES } from "../live/history";
import { Chart } from "../ui/chart";
import type { ChartSpec } from "../ui/plot";
import { Section } from "../ui/text";

export function Charts({ specs }: { specs: ChartSpec[] }) {
  const { history, absent } = useHistory();
  return (
    <Section title="History" id="history" aside={<Ranges />}>
      {absent ? (
        <p class="plain">This node's version keeps no history.</p>
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
