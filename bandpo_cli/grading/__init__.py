"""Verdicts on any text: graders, and the worker processes that the unbounded ones run in."""
