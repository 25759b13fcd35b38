"""Graders of text: mathematical answers, options, exact answers, and the format a response must have."""
