"""Studies: suites of runs over seeds, each run a process of scripts/train.py."""
