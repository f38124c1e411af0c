/** Names and explanations of phases, codes and reachability, written for the owner of the machine. */

import type { AmendmentInfo, GovernanceInfo, MonthUsage, Phase, RecentWork, Status } from "../api/schema";
import { brief, count, duration, energy, many, moment, soon } from "./format";
import { cleanName } from "./sanitize";

interface State {
  /** One word. */
  word: string;
  /** What it means for the owner, in addition to the node's reason. */
  meaning: string;
}

const PHASES: Record<Phase, State> = {
  starting: { word: "Starting", meaning: "The node is loading the model and the text." },
  connecting: { word: "Connecting", meaning: "The node is looking for other members. Training starts automatically." },
  downloading: { word: "Downloading", meaning: "The node is downloading the swarm's model and verifying every piece." },
  training: { word: "Training", meaning: "This machine is training." },
  syncing: { word: "Syncing", meaning: "The node is averaging its progress with the other members." },
  paused: { word: "Paused", meaning: "The node does not compute, and the model is not in memory." },
  draining: { word: "Finishing", meaning: "The node finishes this round and then stops." },
  leaving: { word: "Leaving", meaning: "The node is saving its work and leaving the swarm. This takes some seconds." },
  stopped: { word: "Stopped", meaning: "The node is not training." },
  error: { word: "Error", meaning: "The node stopped with an error. Fix the cause, then resume." },
};

const RUN_OVER: Partial<State> = { meaning: "The run is over. Thank you. The node stops by itself." };

/** Codes with their own word within a phase. */
const CODES: Record<string, Partial<State>> = {
  "training/relay": { word: "Relaying", meaning: "The relay helps members find and reach each other. A relay does not train." },
  "training/no_text": { word: "Waiting", meaning: "The node currently has no text to train on." },
  "syncing/waiting_for_peers": { word: "Waiting", meaning: "Too few members are ready for the round. The node continues automatically when there are enough." },
  "syncing/run_paused": { word: "Paused", meaning: "The whole run is paused. The node trains again when the run is resumed." },
  "connecting/no_peers": { meaning: "No peer has answered yet. The node keeps trying." },
  "connecting/no_state": { meaning: "Members are online, but none can serve the model yet. The node keeps trying." },
  "paused/scheduled": { meaning: "It is outside the hours of your schedule. Training resumes when they start." },
  "paused/on_battery": { meaning: "The machine runs on battery. Training resumes when the charger is connected." },
  "paused/user_active": { meaning: "You are using the machine. Training resumes when you are away." },
  "paused/traffic_limit": { meaning: "Even a paused member has traffic, so the node is not in the swarm. Resume ignores the limit this month." },
  "draining/run_complete": RUN_OVER,
  "draining/publishing": RUN_OVER,
  "stopped/run_complete": { word: "Complete", meaning: "The run is over. Thank you." },
};

/** The worker may get the order to pause in any phase. */
const PAUSING: State = { word: "Pausing", meaning: "The node is saving its work and freeing the device." };

/** Shown before the first answer of the node. */
export const UNKNOWN: State = { word: "Loading", meaning: "" };

/** Explanations for a node whose process has ended in this phase, so that `resume` is not possible. */
const ENDS: Partial<Record<Phase, Partial<State>>> = {
  stopped: { meaning: "This node has ended." },
  error: { meaning: "The node has ended with an error. Fix the cause, then start it again." },
};

/** A relay does not train and has no model, so these phases mean something else for it. */
const RELAY: Partial<Record<Phase, Partial<State>>> = {
  starting: { meaning: "The relay is starting." },
  connecting: { meaning: "The relay is looking for members. It helps them as soon as it finds some." },
  draining: { meaning: "The relay is leaving the swarm." },
  leaving: { meaning: "The relay says goodbye to the members. They find other ways to each other." },
  stopped: { meaning: "The relay is not running. Members use other relays." },
  error: { meaning: "The relay stopped with an error. Fix the cause, then resume." },
};

type Described = Pick<Status, "phase" | "code"> & { final?: boolean; node?: Pick<Status["node"], "mode"> };

export function describe(status: Described | null): State {
  if (!status) return UNKNOWN;
  const phase = PHASES[status.phase] ?? { word: capital(String(status.phase)), meaning: "" };
  const relay = status.node?.mode === "relay" && RELAY[status.phase];
  const ends = status.final && ENDS[status.phase];
  return { ...phase, ...relay, ...ends, ...CODES[`${status.phase}/${status.code}`], ...(status.code === "pausing" && PAUSING) };
}

/** What a node that trains does, with the name of its run; null in every other state. */
export function trainsFor({ phase, code, run }: Pick<Status, "phase" | "code" | "run">): string | null {
  if (phase !== "training" || code !== "training" || !run.name) return null;
  return `This machine trains the language model of the run ${cleanName(run.name, 64)}.`;
}

const IDLE = new Set(["run_paused", "no_text", "waiting_for_peers"]);

/** Whether the node works on a round. Its last speed and time to the next sync count only then. */
export function isMoving({ phase, code }: Pick<Status, "phase" | "code">): boolean {
  return (phase === "training" || phase === "syncing" || phase === "draining") && !IDLE.has(code);
}

/** Whether the node is out of the swarm, so that what it knows of the others is old. */
export function isOutside({ phase, pause }: Pick<Status, "phase" | "pause">): boolean {
  return phase === "stopped" || phase === "error" || pause?.by === "traffic";
}

/** Who else is in the swarm, in one sentence. */
export function company(status: Status): string {
  const { connected, training } = status.peers;
  const links = `${count(connected)} connected to this node.`;
  if (isOutside(status)) return "This node is not in the swarm.";
  if (status.run.is_paused) return `The run is paused, so nobody trains. ${links}`;
  if (training > 1 || connected > 0) return `${many(training, "member")} training, ${links}`;
  if (status.phase === "paused") return "A paused node hears of the others within a minute.";
  if (status.phase === "starting" || status.phase === "connecting") return "No other members are known yet.";
  return isRelay(status) ? "No other members now." : "No other members now. What this node trains alone counts, too.";
}

/** The data folder inside a container. Another folder, or none, has this name outside. */
const CONTAINER_FOLDER = "/data";

/** The command that starts an ended node again; null if it still runs, is in a container, or the run is complete. */
export function restartCommand(status: Pick<Status, "code" | "final" | "node">): string | null {
  if (!status.final || status.code === "run_complete") return null;
  const { mode, data_dir: folder } = status.node;
  if (folder === CONTAINER_FOLDER) return null;
  const word = /^[\w./-]+$/.test(folder) ? folder : `'${folder.replaceAll("'", "'\\''")}'`;
  return `diloco-node ${mode === "relay" ? "relay" : "run"} --data-dir ${word}`;
}

/** The text that the node appends to the reason of a pause if its worker could not save its work. */
const LOST = / What it did since its last checkpoint is lost: .*$/s;

/** The node's reason, with times in the reader's time zone. */
export function reason(status: Pick<Status, "phase" | "code" | "reason" | "pause">, now: number): string {
  const { phase, code, pause } = status;
  if (phase !== "paused") return status.reason;
  const until = moment(pause?.until);
  const lost = LOST.exec(status.reason)?.[0] ?? "";
  if (code === "paused") return (until === null ? "Paused until you resume." : `Paused until ${soon(until, now)}.`) + lost;
  if (code === "scheduled" && until !== null) return `Outside of its hours until ${soon(until, now)}.${lost}`;
  if (code === "traffic_limit" && until !== null) return `The traffic limit of this month is reached. Paused until ${soon(until, now)}.${lost}`;
  return status.reason;
}

/** What a node did lately. `since`: the owner's last visit, ms; null means the last 24 hours. */
export function recentWork({ seen_s: seen, computed_s: computed, tokens, tokens_merged: merged }: RecentWork, since: number | null, now: number): { verdict: string; told: string } {
  const when = since === null ? "In the last 24 hours" : `Since your last visit ${brief((now - since) / 1000)} ago`;
  const minutes = (seconds: number) => duration(seconds < 60 ? seconds : 60 * Math.round(seconds / 60));
  if (!tokens && !computed) return { verdict: "No work yet.", told: `${when}, this machine has not trained.` };
  // The history of an older version has no tokens.
  if (!tokens) return { verdict: "", told: `${when}, this machine has trained for ${minutes(computed)}.` };
  const ran = `${when}, this machine was on for ${minutes(seen)} and trained on ${many(tokens, "token")}.`;
  if (!merged) return { verdict: "Nothing is merged yet.", told: ran };
  return { verdict: "Your work counted.", told: `${ran} ${many(merged, "token")} of its work were merged into the model.` };
}

/** Where the electricity of a month is known from. */
export function energySource({ measured_joules: measured, estimated_joules: estimated }: MonthUsage): string {
  if (!measured && !estimated) return "nothing counted yet";
  if (!estimated) return "measured by the device";
  return measured ? `${energy(estimated)} of it estimated` : "estimated, the device has no meter";
}

/** The word for the phase of a peer, which may be any text. */
export function peerPhase(phase: string): string {
  return PHASES[phase as Phase]?.word ?? capital(phase);
}

function capital(word: string): string {
  return word.charAt(0).toUpperCase() + word.slice(1);
}

/** Whether the node is a relay. Decided by the mode, because codes may come from other peers. */
export function isRelay(status: Pick<Status, "node">): boolean {
  return status.node.mode === "relay";
}

/** Which actions are available now. */
export function availableActions(status: Status): { pause: boolean; resume: boolean; drain: boolean; leave: boolean } {
  const { phase } = status;
  if (status.final) return { pause: false, resume: false, drain: false, leave: false };
  const ending = phase === "leaving" || phase === "draining";
  const halted = phase === "paused" || phase === "stopped" || phase === "error";
  const pending = status.pause?.after_round != null;
  return {
    pause: !isRelay(status) && !ending && !halted,
    resume: halted || (pending && !ending),
    drain: !isRelay(status) && !ending && !halted,
    leave: phase !== "leaving" && phase !== "stopped",
  };
}

const REACH: Record<string, string> = {
  direct: "Other members can reach this node directly.",
  relay: "Other members can reach this node through a relay.",
  none: "Other members cannot connect to this node. It takes part through connections that it opens itself.",
};

const UNTESTED = new Set(["not_tested", "disputed"]);

/** How others reach this node. `nearby`: only from this machine or network, as far as is known. */
export function reach(reachability: string, code?: string, relay = false, nearby = false): string {
  if (code !== undefined && UNTESTED.has(code)) return "Not tested yet. It is unknown whether other members can reach this node.";
  if (relay && reachability === "none") return "Other members cannot connect to this relay, so it relays nothing.";
  if (nearby && reachability === "direct") return "Members on this network can reach this node directly.";
  return REACH[reachability] ?? reachability;
}

/** A source of text without the commit and the options that the manifest names. */
export function sourceName(source: string): string {
  if (source === "builtin:python-stdlib") return "the source code of Python's standard library";
  const [kind, rest] = source.split(/:(.*)/s) as [string, string | undefined];
  const name = (rest ?? source).split("?")[0] as string;
  return kind === "hub" ? `the data set ${name}` : `files of its members (${name})`;
}

/** Who may amend the run. */
export function governedBy({ mode, keys, threshold }: Pick<GovernanceInfo, "mode" | "keys" | "threshold">): string {
  if (mode === "founder") return "Its founder may change it while it runs.";
  if (mode === "keys") return `${threshold} of ${keys.length} keys together may change it while it runs.`;
  return "Nobody may change it while it runs.";
}

/** Whether an amendment is pending, and the first round to which it applies. */
export function amendmentState({
  from_round,
  accepted_round,
  was_skipped,
}: Pick<AmendmentInfo, "from_round" | "accepted_round" | "was_skipped">): string {
  const from = `from round ${from_round} on`;
  if (was_skipped) return `Did not take place before round ${from_round}: too few members had the state.`;
  return accepted_round === null ? `Pending, ${from}.` : `Accepted by round ${accepted_round}, ${from}.`;
}
