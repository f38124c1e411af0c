"""State transfer: how joiners and late nodes get the outer state, and how other nodes serve it."""
