"""A training run, whichever engine does the work: preparation, the loop of steps, its health."""
