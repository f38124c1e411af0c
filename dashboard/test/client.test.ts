import { afterEach, expect, test, vi } from "vitest";
import { api } from "../src/api/client";

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
