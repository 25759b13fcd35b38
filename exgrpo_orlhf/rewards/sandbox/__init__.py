"""Graders that run code: a program against tests in a sandbox, and a user's own reward function."""
