"""The chain of committed rounds, and fork choice."""
