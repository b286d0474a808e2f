"""Memory that torch allocates, from its profiler."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that a call has allocated at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [item for item in recorded.profiler.kineto_results.events() if item.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda item: item.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
