"""Where weights come from: pretrained models, a supervised start (SFT), and the tasks' tiny models."""
