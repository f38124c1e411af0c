"""Writes the curves of a run to files and services. Each sink has a process of its own, `python -m node.sinks NAME`."""
