/** Electricity and traffic of the present calendar month. */

import type { MonthUsage } from "../api/schema";
import { Fact, Section } from "../components/text";
import { bytes, energy, moment, NONE, percent, soon } from "../format/format";
import { energySource } from "../format/status-text";
import { now } from "../state/store";

export function Month({ month, relay }: { month: MonthUsage; relay: boolean }) {
  const traffic = month.sent_bytes + month.received_bytes;
  const joules = month.measured_joules + month.estimated_joules;
  const ends = moment(month.ends_at);
  const limit = relay ? 0 : month.limit_bytes;
  return (
    <Section title="This month" id="month">
      <dl class="ledger">
        <Fact label="Traffic" note={limit ? `${percent(traffic / limit)} of ${bytes(limit)}` : "sent and received"}>
          {bytes(traffic)}
        </Fact>
        {!relay && (
          <Fact label="Electricity" note={energySource(month)}>
            {joules > 0 ? energy(joules) : NONE}
          </Fact>
        )}
      </dl>
      {limit > 0 && (
        <>
          <div
            class="bar month"
            role="progressbar"
            aria-label="Traffic of this month"
            aria-valuemin={0}
            aria-valuemax={100}
            aria-valuenow={Math.min(100, Math.round((100 * traffic) / limit))}
          >
            <i style={{ width: `${Math.min(100, (100 * traffic) / limit).toFixed(1)}%` }} />
          </div>
          <p class="quiet">
            {traffic < limit
              ? `At ${bytes(limit)} of traffic the node leaves the swarm until the next month.`
              : `The limit is reached. The next month begins ${ends === null ? "later" : soon(ends, now.value)}.`}
          </p>
        </>
      )}
    </Section>
  );
}
