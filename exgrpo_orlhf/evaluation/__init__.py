"""Benchmarks and validation: what is asked, who answers, how sure the score is, and what it looks like."""
