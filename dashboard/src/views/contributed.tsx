/** What this machine has done: since its owner last looked, and in all. */

import { useSignal } from "@preact/signals";
import { api } from "../api/client";
import type { RecentWork, Status } from "../api/schema";
import { Fact, Section } from "../components/text";
import { bytes, count, hours, percent } from "../format/format";
import { recentWork } from "../format/status-text";
import { reconnects, usePolling } from "../state/store";
import { lastVisit } from "../state/visits";

const REFRESH_MS = 30_000;
const DAY_MS = 24 * 3_600_000;

export function ContributionSection({ status: now }: { status: Status }) {
  const { contribution, compute_utilization_ratio: busy, forecast_utilization_ratio: forecast } = now;
  const { rounds_joined: joined, rounds_attempted: attempted, bytes_forwarded: forwarded } = contribution;
  return (
    <Section title="Your work" id="given">
      <Recent />
      <dl class="ledger">
        <Fact label="Tokens" note={tokensNote(contribution)}>
          {count(contribution.tokens_total)}
        </Fact>
        <Fact label="Rounds with others" note={attempted ? `of ${count(attempted)} took in your work` : "none yet"}>
          {count(joined)}
        </Fact>
        <Fact label="Compute time">{hours(contribution.training_s)}</Fact>
        <Fact label="Busy, last round" note={forecast == null ? "" : `forecast ${percent(forecast)}`}>{percent(busy)}</Fact>
        <Fact label="Sent" note={forwarded ? `${bytes(forwarded)} for members with slow uplinks` : ""}>
          {bytes(contribution.bytes_sent)}
        </Fact>
        <Fact label="Received">{bytes(contribution.bytes_received)}</Fact>
        {!!contribution.bytes_relayed && <Fact label="Relayed">{bytes(contribution.bytes_relayed)}</Fact>}
      </dl>
    </Section>
  );
}

/** The work of the last day, or since the owner last looked. */
function Recent() {
  const found = useSignal<{ work: RecentWork; since: number | null } | null>(null);
  const since = lastVisit.value;
  usePolling(
    async () => {
      found.value = { work: await api.work(new Date(since ?? Date.now() - DAY_MS).toISOString()), since };
    },
    REFRESH_MS,
    [reconnects.value, since],
  );
  if (!found.value) return null;
  const { verdict, told } = recentWork(found.value.work, found.value.since, Date.now());
  return (
    <p class="recent" data-testid="recent">
      <strong>{verdict}</strong> {told}
    </p>
  );
}

function tokensNote({ tokens_merged: merged, tokens_discarded: discarded }: Status["contribution"]): string {
  const parts = [`${count(merged)} merged into the model`, discarded && `${count(discarded)} not used: their rounds ended without them`];
  return parts.filter(Boolean).join(", ");
}
