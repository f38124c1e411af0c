"""Commands of `node.cli`: a client of the running node, terminal output, and commands on the data folder."""
