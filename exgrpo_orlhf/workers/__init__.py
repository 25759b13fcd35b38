"""Processes with limits: a server loads something once, and forks the workers that answer calls."""
