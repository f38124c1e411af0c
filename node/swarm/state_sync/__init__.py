"""State transfer: how joiners and late nodes get the state, and how it is served."""
