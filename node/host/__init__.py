"""The machine under the node: files, disk quota, ports, GPU power, logging and revision."""
