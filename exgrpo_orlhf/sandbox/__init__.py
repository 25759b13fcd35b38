"""Programs of a model, run against tests under limits."""
