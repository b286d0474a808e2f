"""bandpo: reinforcement learning of language models with Band-constrained Policy Optimization."""

__version__ = "0.2.0"
