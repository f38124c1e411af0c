import { afterEach, expect, test, vi } from "vitest";
import { api, ApiError, closeSession, openSession } from "../src/api/client";

afterEach(() => vi.unstubAllGlobals());

test("queries contain zeros and omit undefined values", async () => {
  const asked: string[] = [];
  vi.stubGlobal("fetch", async (path: string) => {
    asked.push(path);
    return { ok: true, json: async () => ({}) };
  });
  await api.logs("info", "", 300, 0);
  await api.history(new Date(0).toISOString(), 240);
  expect(asked).toEqual([
    "/api/v1/logs?level=info&limit=300&after=0",
    "/api/v1/history?since=1970-01-01T00%3A00%3A00.000Z&points=240",
  ]);
});

/** Answers each request with the next of these statuses. Returns the requests. */
function answering(...statuses: number[]): string[] {
  const kept = new Map<string, string>();
  const asked: string[] = [];
  vi.stubGlobal("sessionStorage", {
    getItem: (key: string) => kept.get(key) ?? null,
    setItem: (key: string, value: string) => kept.set(key, value),
    removeItem: (key: string) => kept.delete(key),
  });
  vi.stubGlobal("fetch", async (path: string, { method }: { method: string }) => {
    asked.push(`${method} ${path}`);
    const status = statuses.shift() as number;
    return { ok: status < 400, status, json: async () => ({ detail: `answer ${status}` }) };
  });
  return asked;
}

const failureOf = (request: Promise<unknown>) => request.catch((error: unknown) => error as ApiError) as Promise<ApiError>;

test("a busy node is not asked again at once", async () => {
  const asked = answering(200, 429);
  await openSession("right");
  const failure = await failureOf(api.generate({ prompt: "a" }));
  expect([failure.message, failure.locked]).toEqual(["answer 429", false]);
  expect(asked).toEqual(["POST /api/v1/session", "POST /api/v1/generate"]);
});

test.each([401, 429])("a token that the node refuses with %i is forgotten, and the page is locked", async (refusal) => {
  const asked = answering(200, 401, refusal, 401);
  await openSession("old");
  expect((await failureOf(api.status())).locked).toBe(true);
  expect((await failureOf(api.status())).locked).toBe(true);
  expect(asked).toEqual(["POST /api/v1/session", "GET /api/v1/status", "POST /api/v1/session", "GET /api/v1/status"]);
});

test("a token that no header can hold is forgotten, and the page is locked", async () => {
  const asked = answering(401, 401);
  sessionStorage.setItem("diloco-token", "right…");
  expect((await failureOf(api.status())).locked).toBe(true);
  expect(sessionStorage.getItem("diloco-token")).toBe(null);
  expect((await failureOf(openSession("right…"))).locked).toBe(true);
  expect(asked).toEqual(["GET /api/v1/status"]);
});

test.each([
  [204, ["closing", "closed"]],
  [401, ["closing", "closed"]],
  [503, ["closing"]],
])("tabs hear that the page is locked only if the session has ended: status %i", async (status, heard) => {
  answering(status);
  const told: unknown[] = [];
  vi.stubGlobal("BroadcastChannel", class {
    postMessage = (word: unknown) => told.push(word);
    close = () => undefined;
  });
  const failure = await closeSession().catch((error: unknown) => error);
  expect([failure instanceof ApiError, told]).toEqual([status === 503, heard]);
});
