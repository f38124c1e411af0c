"""Owners of machines: signed profiles with names and teams, spread among the members and kept on disk."""
