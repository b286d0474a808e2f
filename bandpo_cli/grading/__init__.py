"""Grading: rewards and verdicts for completions, with worker processes for graders of unbounded cost."""
