"""Configuration of a node and of a run: schema, sources, manifest and invite. Imports neither torch nor the swarm."""
