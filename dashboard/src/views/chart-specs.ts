/** The charts of the page and their series. */

import { type ChartSpec, STEPS_S } from "../components/chart-options";
import { bytesPerSecond, count, decimals, duration, inSteps, percent, tokensPerSecond } from "../format/format";

/** 1, 2 and 5 times each power of ten. */
const decimalSteps = (from: number, to: number) =>
  Array.from({ length: to - from }, (_, at) => [1, 2, 5].map((one) => Number(`${one}e${from + at}`))).flat();
/** For labels that are whole numbers. */
const WHOLE = decimalSteps(0, 16);

const LOSS: ChartSpec = {
  id: "loss",
  title: "Loss",
  format: (value) => decimals(value, 3),
  axis: inSteps,
  steps: decimalSteps(-6, 3),
  lines: [
    { key: "training_loss", label: "Training", colour: "--series-quiet", width: 1 },
    { key: "evaluation_loss", label: "Evaluation", colour: "--series-1", width: 2, sparse: true },
  ],
};

const SPEED: ChartSpec = {
  id: "speed",
  title: "Speed of this node",
  format: tokensPerSecond,
  axis: count,
  steps: WHOLE,
  fromZero: true,
  lines: [{ key: "tokens_per_second", label: "This node", colour: "--series-1" }],
};

const TIME: ChartSpec = {
  id: "time",
  title: "Time by activity",
  format: percent,
  range: [0, 1],
  wide: true,
  lines: [
    { key: "activity_compute", label: "Compute", colour: "--series-1", stacked: true },
    { key: "activity_sync_wait", label: "Sync wait", colour: "--series-2", stacked: true },
    { key: "activity_data", label: "Data", colour: "--series-3", stacked: true },
    { key: "activity_evaluate", label: "Evaluate", colour: "--series-4", stacked: true },
    { key: "activity_checkpoint", label: "Checkpoint", colour: "--series-5", stacked: true },
    { key: "activity_paused", label: "Paused", colour: "--series-6", stacked: true },
    { key: "activity_idle", label: "Idle", colour: "--series-7", stacked: true },
    { key: "forecast_utilization_ratio", label: "Forecast", colour: "--ink", dash: [5, 4] },
  ],
};

const SYNC: ChartSpec = {
  id: "sync",
  title: "Sync by stage",
  format: duration,
  steps: [...decimalSteps(-3, 0), ...STEPS_S],
  fromZero: true,
  bars: true,
  lines: [
    { key: "sync_rendezvous", label: "Rendezvous", colour: "--series-3", stacked: true },
    { key: "sync_reduce", label: "Reduce", colour: "--series-2", stacked: true },
    { key: "sync_commit", label: "Commit", colour: "--series-4", stacked: true },
    { key: "sync_apply", label: "Apply", colour: "--series-5", stacked: true },
    { key: "sync_blocked", label: "Training paused for sync", colour: "--ink", dash: [5, 4], sparse: true },
  ],
};

const BYTES: ChartSpec = {
  id: "bytes",
  title: "Bytes",
  format: bytesPerSecond,
  steps: WHOLE,
  fromZero: true,
  lines: [
    { key: "sent_bytes_per_second", label: "Sent", colour: "--series-2" },
    { key: "received_bytes_per_second", label: "Received", colour: "--series-1" },
  ],
};

const SWARM_SPEED: ChartSpec = {
  id: "swarm-speed",
  title: "Speed of the swarm",
  format: tokensPerSecond,
  axis: count,
  steps: WHOLE,
  fromZero: true,
  lines: [{ key: "swarm_tokens_per_second", label: "All members", colour: "--series-1" }],
};

const SWARM_PEERS: ChartSpec = {
  id: "swarm-peers",
  title: "Members training",
  format: count,
  steps: WHOLE,
  fromZero: true,
  lines: [{ key: "swarm_peers", label: "Members", colour: "--series-2" }],
};

export const OVERVIEW_CHARTS = [LOSS, SPEED, TIME, SYNC, BYTES];
export const SWARM_CHARTS = [SWARM_SPEED, SWARM_PEERS, { ...LOSS, id: "swarm-loss", wide: true }];
/** A relay has no loss and no training time. */
export const RELAY_CHARTS = [SWARM_SPEED, SWARM_PEERS, { ...BYTES, wide: true }];
export const RELAY_SWARM_CHARTS = [SWARM_SPEED, SWARM_PEERS];
