/** The words of `/api/v1`: `node/status.py` and `node/api/models.py` as this page reads them. */

export type Phase =
  | "starting" | "connecting" | "downloading" | "training" | "syncing"
  | "paused" | "draining" | "leaving" | "stopped" | "error";

export type Outcome = "complete" | "partial" | "failed" | "skipped" | "alone";
export type Level = "debug" | "info" | "warning" | "error";
export const LEVELS: readonly Level[] = ["debug", "info", "warning", "error"];

export interface Member {
  peer_id: string;
  name: string;
  weight: number;
  included: boolean;
}

export const STAGES = ["rendezvous", "reduce", "commit", "apply"] as const;
export type Stage = (typeof STAGES)[number];

export interface RoundRecord {
  round: number;
  outcome: Outcome;
  members: Member[];
  started_at: string;
  seconds: Record<Stage | "blocked", number>;
  bytes_sent: number;
  bytes_received: number;
  state_digest: string;
  swarm_tokens: number;
  evaluation_loss: number | null;
  reason: string;
  /** So many rounds of this side of a split, ending with `round`, do not hold any more. */
  dropped?: number;
}

export interface Device {
  kind: string;
  name: string;
  utilization_ratio: number | null;
  memory_used_bytes: number | null;
  memory_size_bytes: number | null;
  temperature_celsius: number | null;
  power_watts?: number | null;
}

export interface Notice {
  code: string;
  level: "info" | "warning" | "error";
  text: string;
}

export interface Pause {
  by: string;
  until: string | null;
  after_round: number | null;
}

export interface Status {
  node: { name: string; peer_id: string; version: string; data_dir: string; started_at?: string; mode?: string };
  phase: Phase;
  reason: string;
  code: string;
  since: string;
  /** The process ends with this phase: no order reaches it any more. */
  final?: boolean;
  run: {
    manifest_hash: string;
    invite: string;
    invite_note?: string;
    round: number;
    swarm_round: number;
    swarm_tokens: number;
    state_digest: string;
    name?: string;
    total_tokens?: number;
  };
  training: {
    loss: number | null;
    evaluation_loss: number | null;
    learning_rate: number;
    inner_step: number;
    inner_steps: number;
    tokens_total: number;
    tokens_per_second: number;
  };
  sync: { stage: string; progress_ratio: number; eta_s: number | null; last: RoundRecord | null };
  peers: { connected: number; training: number };
  compute_utilization_ratio: number | null;
  forecast_utilization_ratio?: number | null;
  reachability: string;
  reachability_code?: string;
  reachability_reason: string;
  devices: Device[];
  limits: Record<string, number | null>;
  contribution: {
    rounds_joined: number;
    rounds_attempted: number;
    tokens_total: number;
    bytes_sent: number;
    bytes_received: number;
    tokens_merged?: number;
    tokens_discarded?: number;
    bytes_forwarded?: number;
    bytes_relayed?: number;
    training_s?: number;
  };
  pause?: Pause | null;
  schedule_next?: string | null;
  notices?: Notice[];
}

export interface Peer {
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
  digest_agrees?: boolean | null;
  compute_utilization_ratio?: number | null;
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

/** One time axis (unix seconds, ascending), and a column of the same length for each series; null: not known. */
export interface History {
  step_s: number;
  at_s: number[];
  series: Record<string, (number | null)[]>;
}

export interface LogLine {
  id: number;
  at: string;
  level: Level;
  logger: string;
  message: string;
  round: number | null;
  phase?: string | null;
}

export interface Version {
  version: string;
  revision: string;
  python: string;
  torch: string;
  hivemind: string;
}

export type Json = string | number | boolean | null | Json[] | { [key: string]: Json };

export interface Config {
  config: { [section: string]: Json };
  origins: Record<string, string>;
  /** Dotted keys: `now`, or `restart` where a change holds from the worker's next start. Others cannot be changed. */
  changeable?: Record<string, "now" | "restart">;
  pending_restart?: string[];
}

export interface Fault {
  where: string;
  message: string;
}

export type Action = "pause" | "resume" | "drain" | "leave";
export interface PauseOrder {
  for_s?: number;
  until?: string;
  after_round?: number;
}
