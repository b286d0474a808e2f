"""Evaluation: metrics of sampled or stored completions, their intervals and paired comparisons."""
