"""From texts to verdicts: mathematical answers, options, thoughts and boxes. It knows nothing of training."""
