"""Sampling: the engines with one interface, weight sync, prompts and graded rollouts."""
