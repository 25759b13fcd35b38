"""Tasks made here: questions that need no download, with checkers that see every step of the reasoning."""
