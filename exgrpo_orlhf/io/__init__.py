"""Files, the terminal, signals and names: what is read and written, and how a run is stopped."""
