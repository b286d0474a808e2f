"""An interval of ratios of your own: wider for rarer tokens, and symmetric in the logarithm.

    bandpo bounds 0.001 0.1 0.9 --compare examples.custom_interval:log_interval
    bandpo train --method examples.custom_interval:log_interval --set bounds.options.eps=0.2
    bandpo sweep --method examples.custom_interval:log_interval,clip --seeds 0,1,2 --baseline clip

The function receives log π_old, a float64 tensor; its further arguments are the options.
"""


def log_interval(old_logprobs, eps=0.1):  # type: ignore[no-untyped-def]
    """Return [1/u, u] with u = 1 + ε(1 − log π_old): [0.91, 1.1] for a certain token, [0.64, 1.56] at π_old = 1%."""
    upper = 1 + eps * (1 - old_logprobs)
    return 1 / upper, upper
