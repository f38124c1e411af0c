"""The HTTP API of one node: dashboard, JSON, events and metrics. It reaches the node through `node_interface` only."""
