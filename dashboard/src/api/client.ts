/** HTTP requests to this node, and the session and token that they need. */

import type {
  Contribution, Fault, GeneratedText, GovernanceInfo, History, JournalEntry, LogLine, OwnRun, PauseOrder, RecentWork, ResolvedConfig, RoundRecord, Status, Swarm, TextRequest, Version,
} from "./schema";

export type Json = string | number | boolean | null | Json[] | { [key: string]: Json };
export type Action = "pause" | "resume" | "drain" | "leave";
export type Level = LogLine["level"];
export const LEVELS: readonly Level[] = ["debug", "info", "warning", "error"];

const TIMEOUT_MS = 10_000;
/** The node loads the model for each text. */
const GENERATE_MS = 200_000;
const TOKEN_KEY = "diloco-token";

/** The node answered with an error. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly faults: Fault[] = [],
  ) {
    super(message);
  }

  /** The node accepts neither the session nor the token. */
  get locked(): boolean {
    return this.status === 401;
  }
}

/** Keeps the token while the tab is open. The page also works if the browser forbids storage. */
const tokenStore = {
  get(): string | null {
    try {
      return sessionStorage.getItem(TOKEN_KEY);
    } catch {
      return null;
    }
  },
  set(token: string | null): void {
    try {
      if (token === null) sessionStorage.removeItem(TOKEN_KEY);
      else sessionStorage.setItem(TOKEN_KEY, token);
    } catch {
      // Without storage the tab asks for the token again after the node restarts.
    }
  },
};

/** A token from the URL that has not been exchanged for a session yet. */
let urlToken: string | null = null;

/** Removes the token from the URL fragment of the link that `run` prints. Returns whether there was one. */
export function takeToken(): boolean {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!found) return false;
  urlToken = found;
  tokenStore.set(found);
  history.replaceState(null, "", location.pathname);
  return true;
}

async function toApiError(response: Response): Promise<ApiError> {
  try {
    const problem = (await response.json()) as { detail?: string; title?: string; faults?: Fault[] };
    return new ApiError(response.status, problem.detail || problem.title || `HTTP ${response.status}`, problem.faults ?? []);
  } catch {
    return new ApiError(response.status, `The node answered with HTTP ${response.status}.`);
  }
}

/** Exchanges a token for a session, and keeps the token, because sessions end with the node's process. */
export async function openSession(token: string): Promise<void> {
  if (!/^[\x20-\xff]+$/.test(token)) throw new ApiError(401, "This is no token."); // `fetch` refuses it as a header.
  const headers = { Authorization: `Bearer ${token}` };
  const response = await fetch("/api/v1/session", { method: "POST", headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!response.ok) throw await toApiError(response);
  tokenStore.set(token);
}

/** The channel on which the tabs of this page tell each other that it is locked. */
const LOCK = "diloco-lock";

/** Ends the session, which all tabs share, and makes all of them forget the token. Throws if the node does not answer. */
export async function closeSession(): Promise<void> {
  const tabs = new BroadcastChannel(LOCK);
  tabs.postMessage("closing");
  tokenStore.set(null);
  try {
    await send("DELETE", "/api/v1/session").catch((error: unknown) => {
      if (!(error instanceof ApiError && error.locked)) throw error;
    });
    tabs.postMessage("closed");
  } finally {
    tabs.close();
  }
}

/** Forgets the token when this or another tab locks the page, and runs `then` when the session has ended. */
export function followLock(then: () => void): void {
  new BroadcastChannel(LOCK).addEventListener("message", ({ data }) => {
    tokenStore.set(null);
    if (data === "closed") then();
  });
}

let pendingSession: Promise<void> | null = null;

/** Opens a session with the tab's token: at the first load, and after a restart of the node. */
function reopenSession(token: string): Promise<void> {
  pendingSession ??= openSession(token)
    .catch((error: unknown) => {
      // After many wrong tokens the node answers 429 to the next wrong one.
      if (!(error instanceof ApiError && (error.locked || error.status === 429))) throw error;
      tokenStore.set(null);
      throw new ApiError(401, error.message);
    })
    .finally(() => {
      urlToken = null;
      pendingSession = null;
    });
  return pendingSession;
}

async function send(method: string, path: string, body?: Json, timeoutMs = TIMEOUT_MS): Promise<Response> {
  const init: RequestInit = { method, signal: AbortSignal.timeout(timeoutMs) };
  if (body !== undefined) {
    init.headers = { "Content-Type": "application/json" };
    init.body = JSON.stringify(body);
  }
  const response = await fetch(path, init);
  if (response.ok) return response;
  throw await toApiError(response);
}

async function request<T>(method: string, path: string, body?: Json, timeoutMs?: number): Promise<T> {
  let response: Response;
  if (urlToken) await reopenSession(urlToken);
  try {
    response = await send(method, path, body, timeoutMs);
  } catch (error) {
    const token = tokenStore.get();
    if (!(error instanceof ApiError && error.locked && token)) throw error;
    await reopenSession(token);
    response = await send(method, path, body, timeoutMs);
  }
  return (await response.json()) as T;
}

function query(values: Record<string, string | number | undefined>): string {
  const pairs = Object.entries(values).filter(([, value]) => value !== undefined && value !== "");
  return pairs.length ? `?${new URLSearchParams(pairs.map(([k, v]) => [k, String(v)]))}` : "";
}

export const api = {
  status: () => request<Status>("GET", "/api/v1/status"),
  run: () => request<OwnRun>("GET", "/api/v1/run"),
  swarm: () => request<Swarm>("GET", "/api/v1/swarm"),
  amendments: () => request<GovernanceInfo>("GET", "/api/v1/amendments"),
  journal: async (limit: number) =>
    (await request<{ entries: JournalEntry[] }>("GET", `/api/v1/journal${query({ limit })}`)).entries,
  rounds: async (limit: number) => (await request<{ rounds: RoundRecord[] }>("GET", `/api/v1/rounds${query({ limit })}`)).rounds,
  contributions: async () =>
    (await request<{ contributions: Contribution[] }>("GET", "/api/v1/contributions")).contributions,
  history: (since: string, points: number) =>
    request<History>("GET", `/api/v1/history${query({ since, points })}`),
  work: (since: string) => request<RecentWork>("GET", `/api/v1/work${query({ since })}`),
  logs: (level: Level, search: string, limit: number, after?: number) =>
    request<{ records: LogLine[]; last_id: number }>("GET", `/api/v1/logs${query({ level, search, limit, after })}`),
  version: () => request<Version>("GET", "/api/v1/version"),
  config: () => request<ResolvedConfig>("GET", "/api/v1/config"),
  change: (part: Json) => request<ResolvedConfig>("PATCH", "/api/v1/config", part),
  generate: (order: TextRequest) => request<GeneratedText>("POST", "/api/v1/generate", order as unknown as Json, GENERATE_MS),
  act: (action: Action, order?: PauseOrder) =>
    request<{ phase: string }>("POST", `/api/v1/actions/${action}`, order as Json | undefined),
};

/** One sentence for a person about a failed request. */
export function errorText(error: unknown): string {
  if (error instanceof ApiError) return error.status === 404 ? "This version of the node does not support this request." : error.message;
  return "The node does not answer.";
}
