"""The engines that run one algorithm: generate, score, update, save."""
