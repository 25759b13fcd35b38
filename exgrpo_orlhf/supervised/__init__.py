"""Models made by next-token prediction on given responses: a supervised start (SFT), and the tasks' tiny models."""
