/** The overview of this node: state, contribution, network, devices, charts. */

import { useState } from "preact/hooks";
import type { Status } from "../api/schema";
import { Fact, Prose, Section } from "../components/text";
import { brief, bytes, count, hours, many, NONE, percent } from "../format/format";
import { company, isOutside, isRelay, reach } from "../format/status-text";
import { link, OFFLINE, stale, status } from "../state/store";
import { lastVisit, visitOf, workSince } from "../state/visits";
import { OVERVIEW_CHARTS, RELAY_CHARTS } from "./chart-specs";
import { Amendments } from "./amendments";
import { Charts } from "./charts";
import { Devices } from "./devices";
import { Headline } from "./headline";
import { Journal } from "./journal";
import { Month } from "./month";
import { RunCard } from "./run-card";
import { TryModel } from "./try-model";

export function Overview() {
  const now = status.value;
  if (!now) return <NoStatus />;
  const relay = isRelay(now);
  return (
    <>
      <Headline status={now} />
      <RunCard />
      <Amendments />
      {relay ? <RelaySection status={now} /> : <ContributionSection status={now} />}
      <Publication status={now} />
      {!relay && now.run.round >= 0 && <TryModel />}
      <Month month={now.month} relay={relay} />
      <Network status={now} />
      <Journal />
      {!relay && (
        <Section title="Devices" id="devices">
          <Devices devices={now.devices} phase={now.phase} />
        </Section>
      )}
      <Charts specs={relay ? RELAY_CHARTS : OVERVIEW_CHARTS} />
    </>
  );
}

/** Shown before the first answer. */
function NoStatus() {
  const lost = link.value === "lost";
  return (
    <div class="headline">
      <h1 class="word" data-testid="state">
        {lost ? OFFLINE : "Loading"}
      </h1>
      <p class="reason" data-testid="reason">
        {lost ? "The node does not answer. It may have stopped. This page tries again every two seconds." : "Requesting the status of the node."}
      </p>
    </div>
  );
}

function ContributionSection({ status }: { status: Status }) {
  const { contribution, compute_utilization_ratio: busy, forecast_utilization_ratio: forecast } = status;
  const share = contribution.rounds_attempted ? contribution.rounds_joined / contribution.rounds_attempted : null;
  return (
    <Section title="Contributed" id="given">
      <WhileAway status={status} />
      <dl class="ledger">
        <Fact label="Tokens" note={tokensNote(contribution)}>
          {count(contribution.tokens_total)}
        </Fact>
        <Fact label="Rounds with others" note={share === null ? "none yet" : `${percent(share)} of ${count(contribution.rounds_attempted)} merged`}>
          {count(contribution.rounds_joined)}
        </Fact>
        <Fact label="Compute time">{hours(contribution.training_s)}</Fact>
        <Fact label="Busy, last round" note={forecast == null ? "" : `forecast ${percent(forecast)}`}>{percent(busy)}</Fact>
        <Fact label="Sent" note={contribution.bytes_forwarded ? `${bytes(contribution.bytes_forwarded)} for members with slow uplinks` : ""}>
          {bytes(contribution.bytes_sent)}
        </Fact>
        <Fact label="Received">{bytes(contribution.bytes_received)}</Fact>
        {!!contribution.bytes_relayed && <Fact label="Relayed">{bytes(contribution.bytes_relayed)}</Fact>}
      </dl>
    </Section>
  );
}

/** What this machine did while its owner did not look. */
function WhileAway({ status }: { status: Status }) {
  if (!lastVisit.value) return null;
  const { seconds, tokens, merged, rounds } = workSince(lastVisit.value, visitOf(status, Date.now()));
  const work = tokens
    ? `this machine has trained on ${many(tokens, "token")} in ${many(rounds, "round")} with others, and ${many(merged, "token")} were merged into the model`
    : "this machine has not trained";
  return (
    <p class="away" data-testid="away">
      Since your last visit {brief(seconds)} ago, {work}.
    </p>
  );
}

/** What leaves the run for others: publications, and scores in tasks. Nothing if there are none. */
function Publication({ status }: { status: Status }) {
  const { publication, training } = status;
  if (!publication.to && !training.task_scores.length) return null;
  return (
    <Section title="Published and evaluated" id="published">
      <dl class="ledger">
        {!!publication.to && (
          <Fact label="Published" note={publication.problem || publication.to}>
            {publication.round < 0 ? NONE : `round ${count(publication.round)}`}
          </Fact>
        )}
        {training.task_scores.map((task) => (
          <Fact key={task.name} label={task.name} note={`round ${count(task.round)}, ${many(task.members, "member")}`}>
            {task.score.toFixed(4)}
          </Fact>
        ))}
      </dl>
    </Section>
  );
}

/** A relay makes no contribution of its own, so its page shows what it passes on. */
function RelaySection({ status }: { status: Status }) {
  const { run, peers, contribution } = status;
  return (
    <Section title="Relayed" id="relayed">
      <dl class="ledger">
        <Fact label="Newest round">{run.swarm_round < 0 ? NONE : run.swarm_round}</Fact>
        <Fact label="Training">{many(peers.training, "member")}</Fact>
        <Fact label="Relayed">{bytes(contribution.bytes_relayed ?? 0)}</Fact>
        <Fact label="Sent">{bytes(contribution.bytes_sent)}</Fact>
        <Fact label="Received">{bytes(contribution.bytes_received)}</Fact>
      </dl>
    </Section>
  );
}

function tokensNote({ tokens_merged: merged, tokens_discarded: discarded }: Status["contribution"]): string {
  const parts = [merged != null && `${count(merged)} merged into the model`, discarded && `${count(discarded)} discarded`];
  return parts.filter(Boolean).join(", ");
}

function Network({ status: now }: { status: Status }) {
  const outside = isOutside(now);
  const alone = now.peers.training <= 1 && now.peers.connected === 0;
  return (
    <Section title="Network" id="network">
      <div class="network">
        {!outside && (
          <div>
            <p class="plain" data-reach={now.reachability}>
              <strong>{reach(now.reachability, now.reachability_code, isRelay(now), !!now.run.invite_note)}</strong>
            </p>
            {now.reachability_reason && (
              <p class="quiet">
                <Prose text={now.reachability_reason} />
              </p>
            )}
          </div>
        )}
        <div>
          <p class="plain">
            <strong>{company(now)}</strong>
          </p>
          {alone && !outside && <p class="quiet">Send the invite to someone, who can then join this run.</p>}
          {now.run.invite && !stale.value && !outside && <Invite text={now.run.invite} />}
          {now.run.invite_note && !outside && (
            <p class="quiet" data-invite-note>
              <Prose text={now.run.invite_note} />
            </p>
          )}
        </div>
      </div>
    </Section>
  );
}

/** The invite string with a copy button. */
function Invite({ text }: { text: string }) {
  const [copyResult, setCopyResult] = useState("");
  const copy = async () => {
    try {
      // The browser offers the clipboard only over HTTPS and on localhost.
      await navigator.clipboard.writeText(text);
      setCopyResult("Copied");
    } catch {
      setCopyResult("Select the text and copy it");
    }
    setTimeout(() => setCopyResult(""), 3000);
  };
  return (
    <details class="invite">
      <summary>Invite others</summary>
      <p class="quiet">Send this text. Whoever has it joins with: diloco-node run --join INVITE</p>
      <p class="together">
        <code tabIndex={0}>{text}</code>
        <button type="button" class="button" onClick={copy}>
          Copy
        </button>
      </p>
      <p class="quiet" role="status">
        {copyResult}
      </p>
    </details>
  );
}
