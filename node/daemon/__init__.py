"""The supervisor's process: it owns the data folder, the port and the worker. Knows no torch, no training, no swarm."""
