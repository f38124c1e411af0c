"""Peers, rounds and state transfer. The only room that knows hivemind; knows no model, no data, no training."""
