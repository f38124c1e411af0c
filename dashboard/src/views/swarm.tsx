/** The other members, their contributions, and the rounds. Shows no addresses. */

import { computed, type Signal, useSignal } from "@preact/signals";
import { api } from "../api/client";
import type { Contribution, DepartedPeer, PeerRow, RoundRecord, Swarm as SwarmTable } from "../api/schema";
import { type Column, Table } from "../components/table";
import { Fact, Name, Section } from "../components/text";
import { brief, count, many, moment, NONE, percent, tokensPerSecond } from "../format/format";
import { cleanName } from "../format/sanitize";
import { isOutside, isRelay, peerPhase } from "../format/status-text";
import { now, reconnects, status, usePolling } from "../state/store";
import { RELAY_SWARM_CHARTS, SWARM_CHARTS } from "./chart-specs";
import { Charts } from "./charts";
import { Rounds } from "./rounds";

const PEERS_MS = 3_000;
const RECORDS_MS = 30_000;
const ROUNDS_SHOWN = 50;

// The status changes once a second. A view of a large swarm is drawn again only if one of these changes.
const relay = computed(() => status.value !== null && isRelay(status.value));
const outside = computed(() => status.value !== null && isOutside(status.value));
const runName = computed(() => status.value?.run.name ?? "");
const newest = computed(() => `${status.value?.sync.last?.round}/${status.value?.sync.last?.outcome}`);
const ownPhase = computed(() => (relay.value ? "relaying" : (status.value?.phase ?? null)));
const ownRound = computed(() => status.value?.run.round ?? null);

export function Swarm() {
  const swarm = useSignal<SwarmTable | null>(null);
  const rounds = useSignal<RoundRecord[] | null>(null);
  const contributions = useSignal<Contribution[] | null>(null);

  const swarmFault = usePolling(
    async () => {
      swarm.value = await api.swarm();
    },
    PEERS_MS,
    [reconnects.value],
  );
  // Reload when the status has a new round.
  const recordsFault = usePolling(
    async () => {
      rounds.value = await api.rounds(ROUNDS_SHOWN);
      contributions.value = await api.contributions();
    },
    RECORDS_MS,
    [reconnects.value, newest.value],
  );

  return (
    <>
      <h1 class="title">Swarm {runName.value && <small>{cleanName(runName.value, 48)}</small>}</h1>
      <Sums swarm={swarm} />
      <Section title="Rounds" id="rounds-title">
        {relay.value ? (
          <p class="plain" data-testid="rounds">
            A relay does not take part in rounds. The dashboard of a member shows the rounds.
          </p>
        ) : (
          <RoundsOf rounds={rounds} fault={recordsFault} />
        )}
      </Section>
      <Section title="Peers" id="peers">
        <Peers swarm={swarm} fault={swarmFault} />
      </Section>
      {!relay.value && (
        <Section title="Contributions" id="contributions">
          <Contributions contributions={contributions} fault={recordsFault} />
        </Section>
      )}
      <Charts specs={relay.value ? RELAY_SWARM_CHARTS : SWARM_CHARTS} />
    </>
  );
}

interface RoundsOfProps {
  rounds: Signal<RoundRecord[] | null>;
  fault: string;
}

const RoundsOf = ({ rounds, fault }: RoundsOfProps) => <Rounds rounds={rounds.value} fault={fault} />;

function Peers({ swarm, fault }: { swarm: Signal<SwarmTable | null>; fault: string }) {
  const { peers, departed } = swarm.value ?? { peers: null, departed: [] };
  const rows = outside.value ? [] : [...withOwnStatus(peers ?? []), ...departed.map(asRow)];
  return (
    <Table
      caption="Peers"
      columns={rows.some(hasOwner) ? PEERS : PEERS.filter((column) => column !== OWNER)}
      rows={rows}
      id={(peer) => peer.peer_id}
      first={{ column: "tokens_per_second", descending: true }}
      rowClass={(peer) => (peer.gone ? "departed" : peer.this_node ? "marked" : undefined)}
      empty={outside.value ? "This node is not in the swarm." : peers === null ? fault || "Loading." : "No members yet. Send the invite to someone, who can then join this run."}
    />
  );
}

const Contributions = ({ contributions, fault }: { contributions: Signal<Contribution[] | null>; fault: string }) => (
  <Table
    caption="Contributions"
    columns={CONTRIBUTIONS}
    rows={contributions.value ?? []}
    id={(one) => one.peer_id}
    first={{ column: "tokens", descending: true }}
    rowClass={(one) => (one.this_node ? "marked" : undefined)}
    empty={contributions.value ? "The first credits appear after two rounds." : fault || "Loading."}
  />
);

/** A row of the peer table. A peer that departed within the last hour stays in it, in grey. */
type Row = PeerRow & { gone?: DepartedPeer };

/** What a departed peer did before does not count any more, so its row has no figures and comes last. */
function asRow(gone: DepartedPeer): Row {
  const none = { phase: "", round: -1, tokens_per_second: Number.NaN, compute_utilization_ratio: null, digest_agrees: null };
  return { ...gone.peer, ...none, transport: "", last_seen_s: (now.peek() - (moment(gone.at) ?? now.peek())) / 1000, gone };
}

/** Updates this node's row from its status, which is some seconds newer than the peer table. */
function withOwnStatus(peers: PeerRow[]): Row[] {
  const phase = ownPhase.value;
  const round = ownRound.value;
  return peers.map((peer) => (peer.this_node ? { ...peer, phase: phase ?? peer.phase, round: round ?? peer.round } : peer));
}

function Sums({ swarm }: { swarm: Signal<SwarmTable | null> }) {
  const peers = outside.value ? null : (swarm.value?.peers ?? null);
  const run = status.value?.run;
  // While the run is paused, members report the speed that they had before.
  const working = run?.is_paused ? [] : (peers ?? []).filter((peer) => peer.phase === "training" || peer.phase === "syncing");
  const speed = working.reduce((sum, peer) => sum + peer.tokens_per_second, 0);
  const busy = working.map((peer) => peer.compute_utilization_ratio).filter((ratio) => ratio != null);
  return (
    <dl class="ledger">
      <Fact label="Training" note={run?.is_paused ? "the run is paused" : peers && peers.length > working.length ? `of ${many(peers.length, "member")}` : ""}>
        {peers ? count(working.length) : NONE}
      </Fact>
      <Fact label="Together">{peers ? tokensPerSecond(speed) : NONE}</Fact>
      <Fact label="Busy, mean">{percent(busy.length ? busy.reduce((a, b) => a + b, 0) / busy.length : null)}</Fact>
      <Fact label="Newest round">{run && run.swarm_round >= 0 ? run.swarm_round : NONE}</Fact>
      <Fact
        label="Tokens seen"
        note={run?.total_tokens && run.swarm_tokens ? `${percent(run.swarm_tokens / run.total_tokens)} of ${count(run.total_tokens)}` : ""}
      >
        {count(run?.swarm_tokens || null)}
      </Fact>
    </dl>
  );
}

const AGREES = { true: "agrees", false: "differs" } as const;

/** Whether the machine belongs to an owner with a name or with several machines. */
const hasOwner = (peer: PeerRow) => peer.owner_name !== "" || (peer.owner !== "" && peer.owner !== peer.peer_id);

/** The end of the owner's key tells owners of one name apart. */
const OWNER: Column<Row> = {
  id: "owner",
  label: "Owner",
  key: (peer) => (hasOwner(peer) ? peer.owner_name.toLowerCase() || peer.owner : null),
  cell: (peer) =>
    hasOwner(peer) ? (
      <>
        {peer.owner_name && <Name text={peer.owner_name} most={28} />} <code class="id">{cleanName(peer.owner.slice(-6), 8)}</code>
        {peer.team && <small class="team"><Name text={peer.team} most={28} /></small>}
      </>
    ) : (
      NONE
    ),
};

const PEERS: Column<Row>[] = [
  {
    id: "name",
    label: "Name",
    key: (peer) => peer.name.toLowerCase(),
    cell: (peer) => (
      <>
        <Name text={peer.name || peer.short_id} most={28} /> <code class="id">{cleanName(peer.short_id, 8)}</code>
        {peer.this_node && <em class="tag">this node</em>}
      </>
    ),
  },
  OWNER,
  {
    id: "phase",
    label: "Phase",
    key: (peer) => peer.phase || null,
    cell: (peer) => (peer.gone ? (peer.gone.said_goodbye ? "Left" : "No answer") : cleanName(peerPhase(peer.phase), 16)),
  },
  {
    id: "tokens_per_second",
    label: "Tokens/s",
    key: (peer) => (peer.gone ? null : peer.tokens_per_second),
    cell: (peer) => count(peer.tokens_per_second),
    figure: true,
  },
  { id: "round", label: "Round", key: (peer) => (peer.gone ? null : peer.round), cell: (peer) => (peer.round < 0 ? NONE : peer.round), figure: true },
  {
    id: "busy",
    label: "Busy",
    key: (peer) => peer.compute_utilization_ratio,
    cell: (peer) => percent(peer.compute_utilization_ratio),
    figure: true,
  },
  { id: "transport", label: "Transport", key: (peer) => peer.transport, cell: (peer) => cleanName(peer.transport || NONE, 12) },
  {
    id: "digest",
    label: "State",
    key: (peer) => peer.digest_agrees,
    cell: (peer) =>
      peer.digest_agrees == null ? NONE : <span data-agrees={peer.digest_agrees}>{AGREES[`${peer.digest_agrees}`]}</span>,
  },
  { id: "version", label: "Version", key: (peer) => peer.version, cell: (peer) => cleanName(peer.version || NONE, 16) },
  {
    id: "last_seen",
    label: "Last seen",
    key: (peer) => peer.last_seen_s,
    cell: (peer) => (peer.this_node ? "here" : peer.last_seen_s < 1 ? "now" : `${brief(peer.last_seen_s)} ago`),
    figure: true,
  },
];

const CONTRIBUTIONS: Column<Contribution>[] = [
  {
    id: "name",
    label: "Name",
    key: (one) => one.name.toLowerCase(),
    cell: (one) => (
      <>
        <Name text={one.name || one.short_id} most={28} /> <code class="id">{cleanName(one.short_id, 8)}</code>
        {one.this_node && <em class="tag">this node</em>}
      </>
    ),
  },
  { id: "tokens", label: "Tokens", key: (one) => one.tokens, cell: (one) => count(one.tokens), figure: true },
  { id: "rounds", label: "Rounds", key: (one) => one.rounds, cell: (one) => count(one.rounds), figure: true },
  { id: "last_round", label: "Last round", key: (one) => one.last_round, figure: true },
];
