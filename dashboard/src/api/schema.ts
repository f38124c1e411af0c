/** Generated from /openapi.json by tests/api/test_dashboard_types.py. Do not edit. */

export interface Accepted {
  phase: Phase;
}

export interface AmendmentAccepted {
  digest: string;
}

export interface AmendmentInfo {
  digest: string;
  number: number;
  from_round: number;
  change: string;
  signers: string[];
  is_replaceable: boolean;
  accepted_round: number | null;
  was_skipped: boolean;
}

export interface Contribution {
  peer_id: string;
  short_id: string;
  name: string;
  rounds: number;
  tokens: number;
  last_round: number;
  this_node: boolean;
}

export interface ContributionInfo {
  rounds_joined: number;
  rounds_attempted: number;
  tokens_total: number;
  tokens_merged: number;
  tokens_discarded: number;
  bytes_sent: number;
  bytes_received: number;
  bytes_relayed: number;
  bytes_forwarded: number;
  training_s: number;
}

export interface Contributions {
  contributions: Contribution[];
}

export interface DepartedPeer {
  peer: PeerRow;
  at: string;
  said_goodbye: boolean;
}

export interface DeviceInfo {
  kind: string;
  name: string;
  utilization_ratio: number | null;
  memory_used_bytes: number | null;
  memory_size_bytes: number | null;
  temperature_celsius: number | null;
  energy_joules: number | null;
  power_watts: number | null;
}

export interface Fault {
  where: string;
  message: string;
}

export interface GeneratedText {
  text: string;
  round: number;
}

export interface GovernanceInfo {
  run: string;
  mode: "founder" | "keys" | "fixed";
  keys: string[];
  threshold: number;
  round: number;
  schedule_tokens: number;
  is_paused: boolean;
  amendments: AmendmentInfo[];
  refused: RefusedAmendment[];
}

export interface Health {
  ok: boolean;
  phase: Phase;
  code: string;
}

export interface History {
  step_s: number;
  at_s: number[];
  series: Record<string, (number | null)[]>;
}

export interface JournalEntries {
  entries: JournalEntry[];
}

export interface JournalEntry {
  at: string;
  kind: "joined" | "back" | "left" | "gone" | "node";
  peer_id: string;
  name: string;
  text: string;
}

export interface LogLine {
  id: number;
  at: string;
  level: "debug" | "info" | "warning" | "error";
  logger: string;
  message: string;
  phase: string;
  round: number | null;
}

export interface Logs {
  records: LogLine[];
  last_id: number;
}

export interface LossPoint {
  tokens: number;
  loss: number;
}

export interface Member {
  peer_id: string;
  name: string;
  weight: number;
  included: boolean;
}

export interface MonthUsage {
  month: string;
  ends_at: string;
  sent_bytes: number;
  received_bytes: number;
  limit_bytes: number;
  measured_joules: number;
  estimated_joules: number;
}

export interface NodeInfo {
  name: string;
  peer_id: string;
  version: string;
  data_dir: string;
  mode: "train" | "relay";
  memory_limit_bytes: number | null;
  started_at: string;
}

export interface Notice {
  code: string;
  level: "info" | "warning" | "error";
  text: string;
}

export type Outcome = "complete" | "partial" | "failed" | "skipped" | "alone";

export interface OwnRun {
  run: PublicRun;
  own: RankedMember | null;
  public_page: string;
}

export interface PauseInfo {
  by: "owner" | "schedule" | "battery" | "user" | "traffic" | "";
  until: string | null;
  after_round: number | null;
}

export interface PauseOrder {
  for_s?: number | null;
  until?: string | null;
  after_round?: number | null;
}

export interface PeerRow {
  peer_id: string;
  short_id: string;
  name: string;
  phase: string;
  round: number;
  tokens_per_second: number;
  transport: string;
  version: string;
  state_digest: string;
  last_seen_s: number;
  this_node: boolean;
  owner: string;
  owner_name: string;
  team: string;
  compute_utilization_ratio: number | null;
  publishes: boolean;
  evaluates: boolean;
  evaluation: TaskScores | null;
  digest_agrees: boolean | null;
}

export interface PeersInfo {
  connected: number;
  training: number;
}

export type Phase = "starting" | "connecting" | "downloading" | "training" | "syncing" | "paused" | "draining" | "leaving" | "stopped" | "error";

export interface Problem {
  type: string;
  title: string;
  status: number;
  detail: string;
  code: string;
  faults: Fault[];
}

export interface PublicMember {
  name: string;
  owner: string;
  owner_name: string;
  team: string;
  tokens_per_second: number;
}

export interface PublicRound {
  number: number;
  at: string;
  members: number;
  tokens: number | null;
  loss: number | null;
}

export interface PublicRun {
  name: string;
  purpose: string;
  manifest_hash: string;
  model: string;
  parameters: number;
  data: string[];
  tokenizer: string;
  state: string;
  at: string;
  round: number;
  tokens: number;
  total_tokens: number;
  progress_ratio: number;
  ends_at: string | null;
  tokens_per_second: number | null;
  loss: number | null;
  state_digest: string;
  members: PublicMember[];
  members_now: number;
  members_ever: number;
  leaders: RankedMember[];
  owners: RankedOwner[];
  streaks: RankedOwner[];
  teams: RankedTeam[];
  credit_round: number | null;
  rounds: PublicRound[];
  losses: LossPoint[];
  task_scores: TaskScore[];
  samples: PublicSample[];
  invite: string;
}

export interface PublicSample {
  number: number;
  prompt: string;
  text: string;
}

export interface PublicationInfo {
  to: string;
  round: number;
  revision: string;
  at: string;
  waiting: number;
  problem: string;
}

export interface RankedMember {
  rank: number;
  name: string;
  key: string;
  owner: string;
  tokens: number;
  share_ratio: number;
  rounds: number;
  first_round: number;
  last_round: number;
  streak: number;
}

export interface RankedOwner {
  rank: number;
  name: string;
  key: string;
  team: string;
  machines: number;
  tokens: number;
  share_ratio: number;
  rounds: number;
  first_round: number;
  last_round: number;
  streak: number;
}

export interface RankedTeam {
  rank: number;
  name: string;
  owners: number;
  machines: number;
  tokens: number;
  share_ratio: number;
}

export interface RecentWork {
  seen_s: number;
  rounds: number;
  computed_s: number;
  tokens: number;
  tokens_merged: number;
}

export interface RefusedAmendment {
  digest: string;
  reason: string;
  number: number;
  change: string;
}

export interface ResolvedConfig {
  config: Record<string, unknown>;
  origins: Record<string, string>;
  changeable: Record<string, "now" | "restart">;
  cores: number;
  timezone: string;
  pending_restart: string[];
}

export interface RoundRecord {
  round: number;
  outcome: Outcome;
  members: Member[];
  started_at: string;
  seconds: Seconds;
  bytes_sent: number;
  bytes_received: number;
  head: string;
  state_digest: string;
  swarm_tokens: number;
  evaluation_loss: number | null;
  training_loss: number | null;
  learning_rate: number | null;
  mean_norm: number | null;
  contribution_cosine: number | null;
  dropped: number;
  reason: string;
  attempts: number;
}

export interface Rounds {
  rounds: RoundRecord[];
}

export interface RunInfo {
  name: string;
  manifest_hash: string;
  invite: string;
  invite_note: string;
  round: number;
  swarm_round: number;
  swarm_tokens: number;
  total_tokens: number;
  rewound_tokens: number;
  is_paused: boolean;
  amendments: number;
  head: string;
  state_digest: string;
}

export interface Sample {
  round: number;
  prompt: string;
  text: string;
}

export interface Seconds {
  rendezvous: number;
  reduce: number;
  commit: number;
  apply: number;
  blocked: number;
}

export interface SessionOpened {
  cookie: string;
}

export interface Status {
  schema_version: number;
  node: NodeInfo;
  phase: Phase;
  reason: string;
  code: string;
  since: string;
  final: boolean;
  run: RunInfo;
  training: TrainingInfo;
  sync: SyncInfo;
  peers: PeersInfo;
  compute_utilization_ratio: number | null;
  forecast_utilization_ratio: number | null;
  reachability: string;
  reachability_code: string;
  reachability_reason: string;
  devices: DeviceInfo[];
  limits: Record<string, number | null>;
  contribution: ContributionInfo;
  publication: PublicationInfo;
  month: MonthUsage;
  notices: Notice[];
  pause: PauseInfo;
  schedule_next: string | null;
}

export interface SubmittedAmendment {
  text?: string;
  signatures?: Record<string, string>;
}

export interface Swarm {
  peers: PeerRow[];
  departed: DepartedPeer[];
}

export interface SyncInfo {
  stage: string;
  progress_ratio: number;
  round_s: number | null;
  eta_s: number | null;
  last: RoundRecord | null;
}

export interface TaskScore {
  name: string;
  score: number;
  round: number;
  members: number;
}

export interface TaskScores {
  round: number;
  state_digest: string;
  scores: Record<string, unknown>;
}

export interface TextRequest {
  prompt?: string;
  tokens?: number;
  temperature?: number;
}

export interface TrainingInfo {
  loss: number | null;
  evaluation_loss: number | null;
  learning_rate: number;
  inner_step: number;
  inner_steps: number;
  tokens_total: number;
  tokens_per_second: number;
  samples: Sample[];
  task_scores: TaskScore[];
}

export interface Version {
  version: string;
  revision: string;
  python: string;
  torch: string;
  hivemind: string;
}
