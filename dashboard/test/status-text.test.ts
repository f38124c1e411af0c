import { expect, test } from "vitest";
import type { MonthUsage, Phase, Status } from "../src/api/schema";
import { amendmentState, availableActions, company, describe, governedBy, energySource, isMoving, isOutside, isRelay, peerPhase, reach, reason, recentWork, restartCommand, sourceName, trainsFor } from "../src/format/status-text";

const PHASES: Phase[] = [
  "starting", "connecting", "downloading", "training", "syncing", "paused", "draining", "leaving", "stopped", "error",
];

test("every phase has its own word and explanation", () => {
  const states = PHASES.map((phase) => describe({ phase, code: phase }));
  for (const { word, meaning } of states) {
    expect(word).toMatch(/^[A-Z][a-z]+$/);
    expect(meaning).toMatch(/\.$/);
  }
  expect(new Set(states.map(({ word }) => word)).size).toBe(PHASES.length);
  expect(new Set(states.map(({ meaning }) => meaning)).size).toBe(PHASES.length);
});

test.each([
  ["training", "relay", "Relaying"], ["training", "no_text", "Waiting"], ["training", "pausing", "Pausing"], ["connecting", "pausing", "Pausing"],
  ["syncing", "waiting_for_peers", "Waiting"], ["syncing", "run_paused", "Paused"], ["stopped", "run_complete", "Complete"], ["paused", "scheduled", "Paused"],
  ["paused", "on_battery", "Paused"], ["paused", "user_active", "Paused"], ["training", "a_code_of_tomorrow", "Training"],
] as [Phase, string, string][])("%s with code %s", (phase, code, word) => {
  expect(describe({ phase, code }).word).toBe(word);
});

test("each kind of pause has its own explanation", () => {
  const meanings = ["paused", "scheduled", "on_battery", "user_active"].map((code) => describe({ phase: "paused", code }).meaning);
  expect(new Set(meanings).size).toBe(4);
});

test("unknown phases and reachabilities have a text", () => {
  expect(describe({ phase: "dreaming" as Phase, code: "" }).word).toBe("Dreaming");
  expect(describe(null).word).toBe("Loading");
  expect(peerPhase("")).toBe("");
  expect(reach("direct")).not.toBe(reach("none"));
  expect(reach("none", "not_tested")).toContain("Not tested yet");
  expect(reach("none", "not_reached")).toBe(reach("none"));
  expect(reach("none", "not_reached", true)).toContain("relays nothing");
  expect(reach("direct", "", false, true)).toBe("Members on this network can reach this node directly.");
  expect(reach("relay", "", false, true)).toBe(reach("relay"));
});

const status = (phase: Phase, more: object = {}) => ({ phase, code: phase, node: { mode: "train" }, ...more }) as unknown as Status;

test("only possible actions are offered", () => {
  expect(availableActions(status("training"))).toEqual({ pause: true, resume: false, drain: true, leave: true });
  expect(availableActions(status("paused"))).toEqual({ pause: false, resume: true, drain: false, leave: true });
  expect(availableActions(status("error"))).toEqual({ pause: false, resume: true, drain: false, leave: true });
  expect(availableActions(status("stopped"))).toEqual({ pause: false, resume: true, drain: false, leave: false });
  expect(availableActions(status("leaving"))).toEqual({ pause: false, resume: false, drain: false, leave: false });
  expect(availableActions(status("draining"))).toEqual({ pause: false, resume: false, drain: false, leave: true });
});

test("an ended node offers no actions and shows the start command", () => {
  for (const phase of ["stopped", "error"] as Phase[]) {
    const ended = status(phase, { final: true, node: { mode: "train", data_dir: "/data/ada" } });
    expect(availableActions(ended)).toEqual({ pause: false, resume: false, drain: false, leave: false });
    expect(describe(ended).meaning).not.toBe(describe(status(phase)).meaning);
    expect(describe(ended).meaning).not.toMatch(/resume/);
    expect(restartCommand(ended)).toBe("diloco-node run --data-dir /data/ada");
    expect(restartCommand(status(phase))).toBeNull();
  }
  expect(restartCommand(status("stopped", { final: true, code: "run_complete" }))).toBeNull();
  const relay = { mode: "relay", data_dir: "/home/a b/it's" };
  expect(restartCommand(status("stopped", { final: true, node: { ...relay, data_dir: "/data" } }))).toBeNull();
  expect(restartCommand(status("stopped", { final: true, node: relay }))).toBe("diloco-node relay --data-dir '/home/a b/it'\\''s'");
});

test("the end of a pause is shown in local time", () => {
  const now = new Date(2026, 10, 22, 12, 0).getTime();
  const until = new Date(2026, 10, 23, 8, 0).toISOString();
  const paused = (code: string, end: string | null, lost = "") =>
    reason(status("paused", { code, reason: `The node's.${lost}`, pause: { by: "", until: end, after_round: null } }), now);
  expect(paused("paused", until)).toBe("Paused until tomorrow 08:00.");
  expect(paused("paused", null)).toBe("Paused until you resume.");
  expect(paused("scheduled", until)).toBe("Outside of its hours until tomorrow 08:00.");
  expect(paused("on_battery", null)).toBe("The node's.");
  const lost = "What it did since its last checkpoint is lost: its worker was killed.";
  expect(paused("paused", null, ` ${lost}`)).toBe(`Paused until you resume. ${lost}`);
  expect(paused("paused", until, ` ${lost}`)).toBe(`Paused until tomorrow 08:00. ${lost}`);
  expect(paused("scheduled", until, ` ${lost}`)).toBe(`Outside of its hours until tomorrow 08:00. ${lost}`);
  expect(reason(status("training", { reason: "The node's." }), now)).toBe("The node's.");
});

test("a pending pause can be cancelled; a relay cannot be paused", () => {
  const pending = { by: "owner", until: null, after_round: 7 };
  expect(availableActions(status("training", { pause: pending })).resume).toBe(true);
  expect(availableActions(status("training", { code: "relay" })).pause).toBe(true);
  expect(isRelay(status("syncing", { code: "relay" }))).toBe(false);
  expect(availableActions(status("training", { node: { mode: "relay" } })).pause).toBe(false);
});

test("sources of text have readable names", () => {
  expect(sourceName("builtin:python-stdlib")).toBe("the source code of Python's standard library");
  expect(sourceName("hub:allenai/c4?config=en&revision=1588ec")).toBe("the data set allenai/c4");
  expect(sourceName("text:books/*.txt?field=x")).toBe("files of its members (books/*.txt)");
});

test("a relay has its own texts, which do not speak of training or a model", () => {
  for (const phase of ["starting", "connecting", "draining", "leaving", "stopped", "error"] as Phase[]) {
    const { meaning } = describe(status(phase, { node: { mode: "relay" } }));
    expect(meaning).toMatch(/\brelay\b/);
    expect(meaning).not.toMatch(/train|model|round/i);
  }
  expect(availableActions(status("training", { node: { mode: "relay" } })).drain).toBe(false);
});

test("the page says where the electricity is known from", () => {
  const source = (measured_joules: number, estimated_joules: number) =>
    energySource({ measured_joules, estimated_joules } as MonthUsage).replaceAll("\u202f", " ");
  expect(source(0, 0)).toBe("nothing counted yet");
  expect(source(9e6, 0)).toBe("measured by the device");
  expect(source(0, 9e6)).toBe("estimated, the device has no meter");
  expect(source(9e6, 3.6e6)).toBe("1.00 kWh of it estimated");
});

test("a pause by the traffic limit says until when", () => {
  const now = new Date(2026, 10, 22, 12, 0).getTime();
  const until = new Date(2026, 11, 1).toISOString();
  const paused = status("paused", { code: "traffic_limit", reason: "x", pause: { by: "traffic", until, after_round: null } });
  expect(reason(paused, now)).toBe("The traffic limit of this month is reached. Paused until Tue 1 Dec, 00:00.");
});

test("an amendment says whether it is pending, and from which round on it applies", () => {
  expect(amendmentState({ from_round: 9, accepted_round: null, was_skipped: false })).toBe("Pending, from round 9 on.");
  expect(amendmentState({ from_round: 9, accepted_round: 5, was_skipped: false })).toBe("Accepted by round 5, from round 9 on.");
  expect(amendmentState({ from_round: 9, accepted_round: 5, was_skipped: true })).toContain("not take place");
});

test("each governance names who may change the run", () => {
  const texts = (["founder", "keys", "fixed"] as const).map((mode) => governedBy({ mode, keys: ["a", "b", "c"], threshold: 2 }));
  expect(texts[1]).toContain("2 of 3 keys");
  expect(new Set(texts).size).toBe(3);
});

test("only a node that trains says that it trains the model of the run", () => {
  const run = { name: "tiny", is_paused: false };
  expect(trainsFor(status("training", { run }))).toBe("This machine trains the language model of the run tiny.");
  for (const code of ["relay", "no_text", "pausing"]) expect(trainsFor(status("training", { code, run }))).toBeNull();
  expect(trainsFor(status("paused", { run }))).toBeNull();
});

test("a node that waits has neither a speed nor a next sync", () => {
  expect(isMoving(status("syncing"))).toBe(true);
  for (const code of ["run_paused", "no_text", "waiting_for_peers"]) expect(isMoving(status("syncing", { code }))).toBe(false);
});

test("a node outside the swarm does not tell who trains there", () => {
  const more = { peers: { connected: 3, training: 5 }, run: { is_paused: false }, pause: { by: null } };
  expect(company(status("training", more))).toMatch(/^5 members training, 3 connected/);
  expect(company(status("training", { ...more, run: { is_paused: true } }))).toMatch(/^The run is paused, so nobody trains/);
  for (const phase of ["stopped", "error"] as Phase[]) {
    expect(isOutside(status(phase, more))).toBe(true);
    expect(company(status(phase, more))).toBe("This node is not in the swarm.");
  }
  const limited = status("paused", { ...more, pause: { by: "traffic" } });
  expect(company(limited)).toBe("This node is not in the swarm.");
  const alone = { ...more, peers: { connected: 0, training: 1 } };
  expect(company(status("training", alone))).toContain("trains alone counts");
  for (const phase of ["starting", "connecting"] as Phase[]) {
    expect(company(status(phase, alone))).toBe("No other members are known yet.");
  }
  expect(company(status("paused", alone))).toBe("A paused node hears of the others within a minute.");
  expect(company(status("training", { ...alone, node: { mode: "relay" } }))).toBe("No other members now.");
});

test("the work of a night is told with whether it counted", () => {
  const night = { seen_s: 30_000, rounds: 44, computed_s: 29_000, tokens: 1_140_000, tokens_merged: 1_120_000 };
  const told = (work: object, since: number | null = null) => {
    const { verdict, told: text } = recentWork({ ...night, ...work }, since, 9 * 3_600_000);
    return `${verdict} ${text}`.replaceAll("\u202f", " ");
  };
  expect(told({})).toBe(
    "Your work counted. In the last 24 hours, this machine was on for 8 h 20 min and trained on 1.14 M tokens. " +
      "1.12 M tokens of its work were merged into the model.",
  );
  expect(told({}, 0)).toContain("Since your last visit 9 h ago, this machine was on");
  expect(told({ tokens_merged: 0 })).toContain("Nothing is merged yet.");
  expect(told({ tokens: 0, computed_s: 3600 })).toBe(" In the last 24 hours, this machine has trained for 1 h.");
  expect(told({ tokens: 0, computed_s: 0 })).toBe("No work yet. In the last 24 hours, this machine has not trained.");
});
