/** Who was in which round, as rows that stay the same from round to round. Pure. */

import type { RoundRecord } from "../api/types";

export interface Attendance {
  peers: { peer_id: string; name: string }[];
  /** More peers than there is room for: then the strip counts instead of naming. */
  crowded: boolean;
}

export const ROWS_MAX = 12;

/** The peers of these rounds, whoever was in most of them first, under their newest names. Records newest first. */
export function attendance(records: RoundRecord[]): Attendance {
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

/** What one peer was in one round. */
export function presence(record: RoundRecord, peerId: string): "in" | "out" | "away" {
  const member = record.members.find((one) => one.peer_id === peerId);
  return member ? (member.included ? "in" : "out") : "away";
}
