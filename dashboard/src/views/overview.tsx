/** This node: what it does, what it gave, what it costs. */

import { link, stale, status } from "../live/store";
import { Fact, Prose, Section } from "../ui/text";
import { cleanName } from "../words/clean";
import { isRelay, reach } from "../words/states";
import { bytes, count, hours, many, NONE, percent } from "../words/units";
import type { Status } from "../api/types";
import { Charts } from "./charts";
import { Devices } from "./devices";
import { Invite } from "./invite";
import { Headline } from "./headline";
import { OVERVIEW_CHARTS, RELAY_CHARTS } from "./specs";

export function Overview() {
  const now = status.value;
  if (!now) return <Nothing />;
  const relay = isRelay(now);
  return (
    <>
      <Headline status={now} />
      {relay ? <Run status={now} /> : <Given status={now} />}
      <Reach status={now} />
      {!relay && (
        <Section title="Devices" id="devices">
          <Devices devices={now.devices} phase={now.phase} />
        </Section>
      )}
      <Charts specs={relay ? RELAY_CHARTS : OVERVIEW_CHARTS} />
    </>
  );
}

/** Before the first answer, and where none ever comes. */
function Nothing() {
  const lost = link.value === "lost";
  return (
    <div class="headline">
      <h1 class="word" data-testid="state">
        {lost ? "No answer" : "Asking"}
      </h1>
      <p class="reason" data-testid="reason">
        {lost ? "The node does not answer. It may have stopped; this page tries again every two seconds." : "Asking the node how it is."}
      </p>
    </div>
  );
}

function Given({ status }: { status: Status }) {
  const { contribution, compute_utilization_ratio: busy, forecast_utilization_ratio: forecast } = status;
  const share = contribution.rounds_attempted ? contribution.rounds_joined / contribution.rounds_attempted : null;
  return (
    <Section title="Contributed" id="given">
      <dl class="ledger">
        <Fact label="Tokens" note={tokensNote(contribution)}>
          {count(contribution.tokens_total)}
        </Fact>
        <Fact label="Rounds" note={share === null ? "none with others yet" : `${percent(share)} of ${count(contribution.rounds_attempted)}`}>
          {count(contribution.rounds_joined)}
        </Fact>
        <Fact label="Compute given">{hours(contribution.training_s)}</Fact>
        <Fact label="Busy, last round" note={forecast == null ? "" : `forecast ${percent(forecast)}`}>{percent(busy)}</Fact>
        <Fact label="Sent" note={contribution.bytes_forwarded ? `${bytes(contribution.bytes_forwarded)} for slow lines` : ""}>
          {bytes(contribution.bytes_sent)}
        </Fact>
        <Fact label="Received">{bytes(contribution.bytes_received)}</Fact>
        {!!contribution.bytes_relayed && <Fact label="Relayed">{bytes(contribution.bytes_relayed)}</Fact>}
      </dl>
    </Section>
  );
}

/** What a relay shows in place of work of its own: the run that it is a window on. */
function Run({ status }: { status: Status }) {
  const { run, peers, contribution } = status;
  return (
    <Section title="Run" id="run">
      <dl class="ledger">
        <Fact label="Name">{run.name ? cleanName(run.name, 24) : NONE}</Fact>
        <Fact label="Round">{run.swarm_round < 0 ? NONE : run.swarm_round}</Fact>
        <Fact label="Training">{many(peers.training, "member")}</Fact>
        <Fact label="Goal">{run.total_tokens ? many(run.total_tokens, "token") : NONE}</Fact>
        <Fact label="Relayed">{bytes(contribution.bytes_relayed ?? 0)}</Fact>
        <Fact label="Sent">{bytes(contribution.bytes_sent)}</Fact>
        <Fact label="Received">{bytes(contribution.bytes_received)}</Fact>
      </dl>
    </Section>
  );
}

function tokensNote({ tokens_merged: merged, tokens_discarded: discarded }: Status["contribution"]): string {
  const parts = [merged != null && `${count(merged)} merged`, discarded && `${count(discarded)} discarded`];
  return parts.filter(Boolean).join(", ");
}

function Reach({ status: now }: { status: Status }) {
  const { connected, training } = now.peers;
  const alone = training <= 1 && connected === 0;
  return (
    <Section title="Network" id="network">
      <div class="network">
        <div>
          <p class="plain" data-reach={now.reachability}>
            <strong>{reach(now.reachability, now.reachability_code, isRelay(now))}</strong>
          </p>
          {now.reachability_reason && (
            <p class="quiet">
              <Prose text={now.reachability_reason} />
            </p>
          )}
        </div>
        <div>
          <p class="plain">
            <strong>
              {alone ? "Nobody else is here yet." : `${count(training)} training, ${count(connected)} connected.`}
            </strong>
          </p>
          {alone ? (
            <p class="quiet">Give somebody the invite: whoever pastes it joins this run.</p>
          ) : (
            now.run.swarm_tokens > 0 && (
              <p class="quiet">
                The swarm has seen {many(now.run.swarm_tokens, "token")}
                {now.run.total_tokens ? ` of ${count(now.run.total_tokens)}` : ""}.
              </p>
            )
          )}
          {now.run.invite && !stale.value && <Invite text={now.run.invite} />}
          {now.run.invite_note && (
            <p class="quiet" data-invite-note>
              <Prose text={now.run.invite_note} />
            </p>
          )}
        </div>
      </div>
    </Section>
  );
}
