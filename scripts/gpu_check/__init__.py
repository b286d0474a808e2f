"""`make gpu-check`: checks and measurements of training on one GPU, with random weights and nothing to download."""
