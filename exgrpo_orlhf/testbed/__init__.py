"""Tasks made here, with tiny models that learn them in minutes; graders that check every step of the reasoning."""
