"""The two engines, which generate, score, update and save: `local` and `openrlhf`."""
