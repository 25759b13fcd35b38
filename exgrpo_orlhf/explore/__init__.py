"""The experience of a run as one HTML page: `scripts/explore.py` (docs/explore.md)."""
