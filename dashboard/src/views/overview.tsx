/** The overview of this node: state, contribution, network, devices, charts. */

import { useState } from "preact/hooks";
import type { Status } from "../api/schema";
import { Fact, Prose, Section } from "../components/text";
import { bytes, count, many, NONE } from "../format/format";
import { company, isOutside, isRelay, reach } from "../format/status-text";
import { link, OFFLINE, stale, status } from "../state/store";
import { OVERVIEW_CHARTS, RELAY_CHARTS } from "./chart-specs";
import { Amendments } from "./amendments";
import { Charts } from "./charts";
import { ContributionSection } from "./contributed";
import { Devices } from "./devices";
import { Headline } from "./headline";
import { Journal } from "./journal";
import { Limits } from "./limits";
import { Month } from "./month";
import { ownRun, RunCard } from "./run-card";
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
      <Limits status={now} />
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

/** The line with which others join, with a copy button, and the public page of the run. */
function Invite({ text }: { text: string }) {
  const [copyResult, setCopyResult] = useState("");
  const line = `diloco-node run --join ${text}`;
  const copy = async () => {
    try {
      // The browser offers the clipboard only over HTTPS and on localhost.
      await navigator.clipboard.writeText(line);
      setCopyResult("Copied");
    } catch {
      setCopyResult("Select the line and copy it");
    }
    setTimeout(() => setCopyResult(""), 3000);
  };
  const page = ownRun.value?.public_page;
  return (
    <div class="invite">
      <h3>Invite others</h3>
      <p class="quiet">Send them this line. Whoever has installed diloco-node joins the run with it.</p>
      <p class="together">
        <code tabIndex={0}>{line}</code>
        <button type="button" class="button" onClick={copy}>
          Copy
        </button>
        <span class="quiet" role="status">
          {copyResult}
        </span>
      </p>
      {page && (
        <p class="quiet">
          Everybody can see the run, with the names of its members and without their addresses, on <a href={page}>its public page</a>.
        </p>
      )}
    </div>
  );
}
