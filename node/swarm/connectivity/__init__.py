"""Reachability, hole punching and invite addresses."""
