"""Advantages, the clipped loss and its figures: pure functions of tensors."""
