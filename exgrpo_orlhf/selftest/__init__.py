"""Does this machine or cluster train correctly with a layout? Checks to make before a long run (scripts/doctor.py)."""
