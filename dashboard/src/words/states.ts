/** What a phase is called, and what it means for the machine's owner. Knows phases and codes; knows no page. */

import type { Phase, Status } from "../api/types";
import { moment, soon } from "./time";

interface State {
  /** The one word. */
  word: string;
  /** What it means for the owner, beside the node's own reason. */
  meaning: string;
}

const PHASES: Record<Phase, State> = {
  starting: { word: "Starting", meaning: "Getting model and text ready. Nothing is asked of you." },
  connecting: { word: "Connecting", meaning: "Looking for the others, for as long as it takes. Training begins by itself." },
  downloading: { word: "Downloading", meaning: "Fetching the model as the swarm has it, and checking every piece." },
  training: { word: "Training", meaning: "This machine is helping." },
  syncing: { word: "Syncing", meaning: "Averaging progress with the others." },
  paused: { word: "Paused", meaning: "The machine is yours: the model has left its memory." },
  draining: { word: "Finishing", meaning: "This round is seen through, then the node stops." },
  leaving: { word: "Leaving", meaning: "Saving, saying goodbye. It takes some seconds." },
  stopped: { word: "Stopped", meaning: "Nothing runs. Work is saved." },
  error: { word: "Error", meaning: "The node gave up. Mend what it names, then resume." },
};

/** Codes that deserve a word of their own within a phase. */
const CODES: Record<string, Partial<State>> = {
  "training/relay": { word: "Relaying", meaning: "Helping others find and reach each other, and a window on their run." },
  "training/no_text": { word: "Waiting", meaning: "There is no text to train on at the moment." },
  "training/pausing": { word: "Pausing", meaning: "Saving its work and freeing the device." },
  "syncing/pausing": { word: "Pausing", meaning: "Saving its work and freeing the device." },
  "syncing/waiting_for_peers": { word: "Waiting", meaning: "Too few members are ready for the round. It goes on by itself." },
  "connecting/no_peers": { meaning: "Nobody has answered yet. It keeps trying, and training begins by itself." },
  "connecting/no_state": { meaning: "Others are there, but none can give the model yet. It keeps trying." },
  "paused/scheduled": { meaning: "Outside the hours of your schedule. The machine is yours until they begin." },
  "paused/on_battery": { meaning: "On battery. Training goes on when the charger is back." },
  "paused/user_active": { meaning: "You are at the machine. Training goes on when you are away." },
  "stopped/run_complete": { word: "Complete", meaning: "The run has seen all of its tokens. Thank you." },
};

/** What this page says while it knows nothing from the node. */
export const UNKNOWN: State = { word: "Asking", meaning: "" };

/** What a phase means where the node's process ends with it, so that there is nothing left to resume. */
const ENDS: Partial<Record<Phase, Partial<State>>> = {
  stopped: { meaning: "This node has ended. Nothing of it runs." },
  error: { meaning: "The node gave up, and has ended. Mend what it names, then start it again." },
};

export function describe(status: Pick<Status, "phase" | "code" | "final"> | null): State {
  if (!status) return UNKNOWN;
  const phase = PHASES[status.phase] ?? { word: capital(String(status.phase)), meaning: "" };
  return { ...phase, ...(status.final && ENDS[status.phase]), ...CODES[`${status.phase}/${status.code}`] };
}

/** The command that brings back a node that has ended; null while it lives, and where there is nothing left to do. */
export function startAgain(status: Pick<Status, "code" | "final" | "node">): string | null {
  if (!status.final || status.code === "run_complete") return null;
  const { mode, data_dir: folder } = status.node;
  const word = /^[\w./-]+$/.test(folder) ? folder : `'${folder.replaceAll("'", "'\\''")}'`;
  return `diloco-node ${mode === "relay" ? "relay" : "run"} --data-dir ${word}`;
}

/** What the node adds to the reason of a pause whose worker could not save. */
const LOST = / What it did since its last checkpoint is lost: .*$/s;

/** The node's own reason; where that has a moment in it, told by the clock of whoever reads. */
export function reason(status: Pick<Status, "phase" | "code" | "reason" | "pause">, now: number): string {
  const { phase, code, pause } = status;
  if (phase !== "paused") return status.reason;
  const until = moment(pause?.until);
  const lost = LOST.exec(status.reason)?.[0] ?? "";
  if (code === "paused") return (until === null ? "Paused until you resume." : `Paused until ${soon(until, now)}.`) + lost;
  if (code === "scheduled" && until !== null) return `Outside of its hours until ${soon(until, now)}.${lost}`;
  return status.reason;
}

/** The word for what a peer does. Peers are strangers, and may say any word or none. */
export function peerPhase(phase: string): string {
  return PHASES[phase as Phase]?.word ?? capital(phase);
}

function capital(word: string): string {
  return word.charAt(0).toUpperCase() + word.slice(1);
}

/** A relay helps others find each other, and trains nothing. By its mode: a code may be another peer's word. */
export function isRelay(status: Pick<Status, "node">): boolean {
  return status.node.mode === "relay";
}

/** Which of the three orders make sense now. */
export function orders(status: Status): { pause: boolean; resume: boolean; leave: boolean } {
  const { phase } = status;
  if (status.final) return { pause: false, resume: false, leave: false };
  const ending = phase === "leaving" || phase === "draining";
  const halted = phase === "paused" || phase === "stopped" || phase === "error";
  const pending = status.pause?.after_round != null;
  return {
    pause: !isRelay(status) && !ending && !halted,
    resume: halted || (pending && !ending),
    leave: phase !== "leaving" && phase !== "stopped",
  };
}

const REACH: Record<string, string> = {
  direct: "Others reach this node directly.",
  relay: "Others reach this node through a relay.",
  none: "Nobody can call this node. It takes part all the same, over connections that it opens itself.",
};

const UNTESTED = new Set(["not_tested", "disputed"]);

export function reach(reachability: string, code?: string, relay = false): string {
  if (code !== undefined && UNTESTED.has(code)) return "Not tested yet whether others reach this node.";
  if (relay && reachability === "none") return "Nobody can call this relay, so it carries no calls.";
  return REACH[reachability] ?? reachability;
}
