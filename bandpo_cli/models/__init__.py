"""Models: loading and checks, packed rows, log-probs without the matrix of logits, memory estimates."""
