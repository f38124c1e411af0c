/** Requests to this node, and the session they need. Knows HTTP and the token's whereabouts; knows no view. */

import type {
  Action, Config, Contribution, Fault, History, Json, Level, LogLine, Peer, PauseOrder, RoundRecord, Status, Version,
} from "./types";

const TIMEOUT_MS = 10_000;
const TOKEN_KEY = "diloco-token";

/** The node answered, and it was a refusal. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly faults: Fault[] = [],
  ) {
    super(message);
  }

  /** Neither session nor token opens this node. */
  get locked(): boolean {
    return this.status === 401 || this.status === 429;
  }
}

/** Where the token is between two loads of the page in one tab. Storage may be forbidden; the page works without. */
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
      // Then this tab asks again after the node's restart.
    }
  },
};

/** A token that came with the address and has not been traded for a session yet. */
let arrived: string | null = null;

/** Take the token out of the address, where `run`'s link carries it, before anything else can see it. */
export function takeToken(): void {
  arrived = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!arrived) return;
  tokenStore.set(arrived);
  history.replaceState(null, "", location.pathname);
}

async function refusal(response: Response): Promise<Refused> {
  try {
    const problem = (await response.json()) as { detail?: string; title?: string; faults?: Fault[] };
    return new Refused(response.status, problem.detail || problem.title || `HTTP ${response.status}`, problem.faults ?? []);
  } catch {
    return new Refused(response.status, `The node answered with HTTP ${response.status}.`);
  }
}

/** Trade a token for a session, and keep the token for the tab's life, because sessions end with the node. */
export async function openSession(token: string): Promise<void> {
  const headers = { Authorization: `Bearer ${token}` };
  const response = await fetch("/api/v1/session", { method: "POST", headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!response.ok) throw await refusal(response);
  tokenStore.set(token);
}

export async function closeSession(): Promise<void> {
  tokenStore.set(null);
  await send("DELETE", "/api/v1/session");
}

let opening: Promise<void> | null = null;

/** Open the session anew with the tab's token: at the first load, and after the node's restart. */
function reopen(token: string): Promise<void> {
  opening ??= openSession(token)
    .catch((error: unknown) => {
      if (error instanceof Refused && error.locked) tokenStore.set(null);
      throw error;
    })
    .finally(() => {
      arrived = null;
      opening = null;
    });
  return opening;
}

async function send(method: string, path: string, body?: Json): Promise<Response> {
  const init: RequestInit = { method, signal: AbortSignal.timeout(TIMEOUT_MS) };
  if (body !== undefined) {
    init.headers = { "Content-Type": "application/json" };
    init.body = JSON.stringify(body);
  }
  const response = await fetch(path, init);
  if (response.ok) return response;
  throw await refusal(response);
}

async function ask<T>(method: string, path: string, body?: Json): Promise<T> {
  let response: Response;
  if (arrived) await reopen(arrived);
  try {
    response = await send(method, path, body);
  } catch (error) {
    const token = tokenStore.get();
    if (!(error instanceof Refused && error.locked && token)) throw error;
    await reopen(token);
    response = await send(method, path, body);
  }
  return (await response.json()) as T;
}

function query(values: Record<string, string | number | undefined>): string {
  const pairs = Object.entries(values).filter(([, value]) => value !== undefined && value !== "");
  return pairs.length ? `?${new URLSearchParams(pairs.map(([k, v]) => [k, String(v)]))}` : "";
}

export const api = {
  status: () => ask<Status>("GET", "/api/v1/status"),
  swarm: async () => (await ask<{ peers: Peer[] }>("GET", "/api/v1/swarm")).peers,
  rounds: async (limit: number) => (await ask<{ rounds: RoundRecord[] }>("GET", `/api/v1/rounds${query({ limit })}`)).rounds,
  contributions: async () =>
    (await ask<{ contributions: Contribution[] }>("GET", "/api/v1/contributions")).contributions,
  history: (since: string, points: number) =>
    ask<History>("GET", `/api/v1/history${query({ since, points })}`),
  logs: (level: Level, search: string, limit: number, after?: number) =>
    ask<{ records: LogLine[]; last_id: number }>("GET", `/api/v1/logs${query({ level, search, limit, after })}`),
  version: () => ask<Version>("GET", "/api/v1/version"),
  config: () => ask<Config>("GET", "/api/v1/config"),
  change: (part: Json) => ask<Config>("PATCH", "/api/v1/config", part),
  act: (action: Action, order?: PauseOrder) =>
    ask<{ phase: string }>("POST", `/api/v1/actions/${action}`, order as Json | undefined),
};

/** One sentence about what went wrong, for a person. */
export function sentence(error: unknown): string {
  if (error instanceof Refused) return error.status === 404 ? "This node's version does not know this." : error.message;
  return "The node does not answer.";
}
