"""Governance: who may change a running run, and how a signed change reaches all members."""
