"""Rewards, advantages, the clipped loss and the clip metrics: pure functions of tensors."""
