"""Benchmarks and validation: questions, engines that answer them, scores with intervals, reports."""
