"""What is checked before a run."""
