"""Averaging of contributions: chunk layouts, reducers, and the store of results."""
