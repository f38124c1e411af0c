/** Lists of round records and log lines: participants per round, and bounded logs. Pure functions. */

import type { LogLine, RoundRecord } from "../api/schema";

export interface Participants {
  peers: { peer_id: string; name: string }[];
  /** Whether there are too many peers to list, so that the strip shows counts. */
  crowded: boolean;
}

export const ROWS_MAX = 12;

/** The peers of these rounds with their newest names, by number of rounds. Records are newest first. */
export function participants(records: RoundRecord[]): Participants {
  const known = new Map<string, { peer_id: string; name: string; rounds: number }>();
  for (const { members } of records) {
    for (const { peer_id, name } of members) {
      const peer = known.get(peer_id) ?? { peer_id, name, rounds: 0 };
      peer.rounds += 1;
      known.set(peer_id, peer);
    }
  }
  const peers = [...known.values()].sort((a, b) => b.rounds - a.rounds || a.peer_id.localeCompare(b.peer_id));
  return { peers: peers.map(({ peer_id, name }) => ({ peer_id, name })), crowded: peers.length > ROWS_MAX };
}

/** Whether a peer was included, left out, or absent in a round. */
export function presence(record: RoundRecord, peerId: string): "in" | "out" | "away" {
  const member = record.members.find((one) => one.peer_id === peerId);
  return member ? (member.included ? "in" : "out") : "away";
}

/** The most log lines that the page keeps. The log files in the data folder have more. */
export const LINES_MAX = 1_500;

export function appendLines(have: LogLine[], fresh: LogLine[]): LogLine[] {
  const last = have.at(-1)?.id ?? -1;
  return have.concat(fresh.filter((line) => line.id > last)).slice(-LINES_MAX);
}
