"""A count of the operations for which the host would wait for a GPU, on a machine without one."""

from collections import Counter
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class DeviceReads(TorchFunctionMode):
    """Counts, by phase, what would make the host wait for a GPU: values that it reads, and shapes that depend on them.

    Tensors that torch makes of Python numbers are in memory of the host until they are moved, as are `host_copy` and
    what is computed from such tensors alone. A tensor that is created on the device of another one is on either side.
    """

    READS = attrgetter("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")(Tensor)
    SHAPES = (Tensor.nonzero, torch.nonzero, torch.bincount, torch.unique, torch.masked_select)

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.reads = "", Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        sides = {getattr(item, "on_host", False) for item in inputs}
        waits = func in (*self.READS, *self.SHAPES)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            waits = any(
                isinstance(item, Tensor) and item.dtype == torch.bool for item in tree_leaves(args[1])
            )
        if func in (Tensor.repeat_interleave, torch.repeat_interleave):
            waits = len(inputs) > 1 and "output_size" not in kwargs
        self.reads[self.phase] += waits and False in sides
        result = func(*args, **kwargs)
        moved = func is Tensor.to and any(isinstance(item, torch.device) for item in args)
        created = None if "device" in kwargs else True  # of no tensor
        on_host = False if moved or False in sides else True in sides or created
        for item in tree_leaves(result):
            if isinstance(item, Tensor):
                item.on_host = on_host  # type: ignore[attr-defined]
        return result


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy that `DeviceReads` takes to be in memory of the host, as `models.packing.host_copy` returns one."""
    copy = tensor.clone()
    copy.on_host = True  # type: ignore[attr-defined]
    return copy
