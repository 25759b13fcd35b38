"""Tasks made here: questions that need no download, with graders that check every step of the reasoning."""
