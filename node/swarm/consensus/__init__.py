"""How members agree on a round: attempts, leader, votes, commit. PROTOCOL.md states the rules."""
