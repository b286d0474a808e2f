"""Tools of `conversations.py`, in a module that a worker imports without torch."""

import asyncio
import time


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return "done"


def blocking_wait(seconds: float) -> str:
    """Wait, and block the worker.

    Args:
        seconds: how long.
    """
    time.sleep(seconds)
    return "done"
