"""Training: the loop, experiences, policy updates, the optimizer and checkpoints."""
