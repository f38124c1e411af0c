import { expect, test } from "vitest";
import type { Notice, Status } from "../src/api/schema";
import { alertsOf, AlertWatch, GONE_MS, healthOf, OFFLINE_MS, SETTLE_MS, UNANSWERED_MS, WAITS_MS } from "../src/state/alerts";

const status = (more: object = {}) =>
  ({ phase: "training", reason: "Trains.", reachability_code: "reached", reachability_reason: "", node: { mode: "train" }, notices: [], ...more }) as unknown as Status;
const notice = (code: string, level: Notice["level"]) => ({ code, level, text: `${code}.` });
const codes = (alerts: { code: string }[]) => alerts.map(({ code }) => code);

test("an error, an unreachable node, a warning and a newer version need the owner, and other notes do not", () => {
  const notices = [notice("disk_quota", "warning"), notice("newer_version", "info"), notice("api_port", "info")];
  const bad = status({ phase: "error", notices, reachability_code: "not_reached", reachability_reason: "Open the port." });
  expect(codes(alertsOf(bad))).toEqual(["disk_quota", "newer_version", "error", "unreachable"]);
  expect(alertsOf(status())).toEqual([]);
  expect(codes(alertsOf(status({ reachability_code: "not_reached", reachability_reason: "x", node: { mode: "relay" } })))).toEqual([]);
});

test("an alert is told once after it has lasted, and again only after it was gone", () => {
  const watch = new AlertWatch();
  const bad = status({ phase: "error" });
  expect(watch.next(bad, 0)).toEqual([]);
  expect(watch.next(status(), 5_000)).toEqual([]);
  expect(watch.next(bad, 6_000)).toEqual([]);
  expect(watch.next(bad, 6_000 + SETTLE_MS - 1)).toEqual([]);
  expect(codes(watch.next(bad, 6_000 + SETTLE_MS))).toEqual(["error"]);
  expect(watch.next(bad, 60_000)).toEqual([]);
  watch.next(status(), 100_000);
  watch.next(bad, 110_000);
  expect(watch.next(bad, 110_000 + SETTLE_MS)).toEqual([]);
  watch.next(status(), 200_000);
  watch.next(status(), 200_000 + GONE_MS);
  watch.next(bad, 300_000);
  expect(codes(watch.next(bad, 300_000 + SETTLE_MS))).toEqual(["error"]);
});

test("a second error with another reason is told soon after the first one", () => {
  const watch = new AlertWatch();
  watch.next(status({ phase: "error", reason: "The disk is full." }), 0);
  expect(codes(watch.next(status({ phase: "error", reason: "The disk is full." }), SETTLE_MS))).toEqual(["error"]);
  watch.next(status(), 15_000);
  const other = status({ phase: "error", reason: "The GPU is gone." });
  expect(watch.next(other, 20_000)).toEqual([]);
  expect(watch.next(other, 20_000 + SETTLE_MS)).toEqual([{ code: "error", text: "The GPU is gone." }]);
});

test("a wait for memory is told after minutes, because a game may hold it", () => {
  const watch = new AlertWatch();
  const waiting = status({ phase: "starting", code: "memory_limit", reason: "Raise the limit." });
  expect(watch.next(waiting, 0)).toEqual([]);
  expect(watch.next(waiting, WAITS_MS - 1)).toEqual([]);
  expect(watch.next(waiting, WAITS_MS)).toEqual([{ code: "memory_limit", text: "Raise the limit." }]);
});

test("an unreachable node that starts again and was not tested yet is not told twice", () => {
  const watch = new AlertWatch();
  const closed = { reachability_code: "not_reached", reachability_reason: "Open the port." };
  watch.next(status(closed), 0);
  expect(codes(watch.next(status(closed), SETTLE_MS))).toEqual(["unreachable"]);
  watch.next(status({ phase: "starting", reachability_code: "not_tested" }), 20_000);
  watch.next(status({ reachability_code: "disputed" }), 20_000 + 2 * GONE_MS);
  watch.next(status(closed), 20_000 + 3 * GONE_MS);
  expect(watch.next(status(closed), 20_000 + 3 * GONE_MS + SETTLE_MS)).toEqual([]);
  watch.next(status(), 400_000);
  watch.next(status(), 400_000 + GONE_MS);
  watch.next(status(closed), 500_000);
  expect(codes(watch.next(status(closed), 500_000 + SETTLE_MS))).toEqual(["unreachable"]);
});

test("a watch does not repeat what an earlier one has told", () => {
  const first = new AlertWatch();
  const bad = status({ notices: [notice("disk_quota", "warning")] });
  first.next(bad, 0);
  expect(codes(first.next(bad, SETTLE_MS))).toEqual(["disk_quota"]);
  const next = new AlertWatch(first.told);
  next.next(bad, 60_000);
  expect(next.next(bad, 60_000 + SETTLE_MS)).toEqual([]);
  next.next(status(), 100_000);
  next.next(status(), 100_000 + GONE_MS);
  expect([...next.told]).toEqual([]);
});

test("a node that does not answer is told once until it answers again", () => {
  const watch = new AlertWatch();
  expect(watch.next(null, 0)).toEqual([]);
  expect(watch.next(null, OFFLINE_MS - 1)).toEqual([]);
  expect(codes(watch.next(null, OFFLINE_MS))).toEqual(["offline"]);
  expect(watch.next(null, 2 * OFFLINE_MS)).toEqual([]);
  watch.next(status(), 3 * OFFLINE_MS);
  watch.next(null, 4 * OFFLINE_MS);
  expect(codes(watch.next(null, 5 * OFFLINE_MS))).toEqual(["offline"]);
  watch.next(status({ phase: "stopped", final: true }), 6 * OFFLINE_MS);
  watch.next(null, 7 * OFFLINE_MS);
  expect(watch.next(null, 9 * OFFLINE_MS), "a node that has ended as asked is not missed").toEqual([]);
});

const well = { code: "training", since: "2026-01-01T00:00:00Z", peers: { training: 3, connected: 2 }, run: {}, sync: { last: null } };
const START = Date.parse("2026-01-01T00:00:00Z");
const health = (more: object, now = START) => healthOf(status({ ...well, ...more }), now);

test.each([
  [{}, "All is well. You need to do nothing."],
  [{ peers: { training: 1, connected: 0 } }, "trains alone. Its work counts."],
  [{ sync: { last: { outcome: "failed" } } }, "the members try it again"],
  [{ phase: "paused", pause: { by: "owner" } }, "The machine is yours until you resume."],
  [{ phase: "paused", pause: { by: "battery" } }, "until the node resumes by itself."],
  [{ phase: "paused", pause: { by: "owner", until: "2026-01-01T08:00:00Z" } }, "until the node resumes by itself."],
  [{ phase: "syncing", code: "waiting_for_peers" }, "goes on by itself when others come"],
  [{ phase: "syncing", code: "run_paused", run: { is_paused: true } }, "The whole run is paused."],
  [{ notices: [notice("newer_version", "info")] }, "All is well."],
  [{ reachability_code: "not_reached", reachability_reason: "x" }, "Others cannot connect to this machine, which takes part"],
])("a node that works is well: %j", (more, text) => {
  expect(health(more)).toEqual({ well: true, text: expect.stringContaining(text) });
});

test("an error, a warning and a silence of minutes are not well", () => {
  expect(health({ phase: "error" })).toEqual({ well: false, text: expect.stringContaining("does not train") });
  expect(health({ notices: [notice("disk_quota", "warning")] })).toEqual({ well: false, text: expect.stringContaining("warning below") });
  const lost = { phase: "connecting", code: "no_peers" };
  expect(health(lost, START + UNANSWERED_MS)?.well).toBe(true);
  expect(health(lost, START + UNANSWERED_MS + 1)).toEqual({ well: false, text: expect.stringContaining("no member has answered") });
  expect(health({ ...lost, code: "no_state" }, START + 2 * UNANSWERED_MS)?.well).toBe(true);
  const waiting = { phase: "starting", code: "does_not_fit", reason: "Free some memory." };
  expect(health(waiting, START + WAITS_MS)).toEqual({ well: true, text: expect.stringContaining("goes on by itself") });
  expect(health(waiting, START + WAITS_MS + 1)).toEqual({ well: false, text: expect.stringContaining("The reason is above") });
  expect(health({ phase: "stopped" })).toBeNull();
});
