"""HTTP over one node: pages, JSON, events, metrics. Knows no process and no worker; what it needs is in `seam.py`."""
