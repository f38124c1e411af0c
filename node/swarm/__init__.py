"""Peers, rounds and state transfer. Only this package imports hivemind. It knows no model, no data and no training."""
