/** What is typed in the settings against what the node has: the difference, as a request. Pure. */

import type { Config, Fault, Json } from "../api/types";

/** The value under a dotted key; undefined where the configuration has none. */
export function valueAt(config: Config["config"], key: string): Json | undefined {
  let found: Json | undefined = config;
  for (const part of key.split(".")) {
    if (found === null || typeof found !== "object" || Array.isArray(found)) return undefined;
    found = found[part];
  }
  return found;
}

/** Changed values as nested tables; null gives a key back to the configuration it had. */
export function patch(changes: Record<string, Json>): { [key: string]: Json } {
  const nested: { [key: string]: Json } = {};
  for (const [key, value] of Object.entries(changes)) {
    const parts = key.split(".");
    const last = parts.pop() as string;
    let table = nested;
    for (const part of parts) table = (table[part] ??= {}) as { [key: string]: Json };
    table[last] = value;
  }
  return nested;
}

export function sameValue(a: Json | undefined, b: Json | undefined): boolean {
  return JSON.stringify(a) === JSON.stringify(b);
}

/** Faults by the key they belong to; the rest under "". A list's fault names the element behind the key. */
export function byKey(faults: Fault[], keys: string[]): Record<string, string> {
  const found: Record<string, string> = {};
  for (const { where, message } of faults) {
    const key = keys.find((one) => `.${where}.`.includes(`.${one}.`)) ?? "";
    found[key] = found[key] ? `${found[key]} ${message}` : message;
  }
  return found;
}
