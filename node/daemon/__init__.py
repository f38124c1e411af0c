"""The supervisor's process, which owns the data directory, the API's port and the worker. It never imports torch."""
