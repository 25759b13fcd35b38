"""Evaluation during training, and what runs look like side by side."""
