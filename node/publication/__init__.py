"""Publications of a run: the model folder with its outer state, the places that hold them, and how they are read."""
