"""The round: attempts, votes, leader, commit. PROTOCOL.md states its rules."""
