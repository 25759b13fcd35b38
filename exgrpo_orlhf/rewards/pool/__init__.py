"""Grading in processes that can be killed: the pool, and the process that it starts."""
