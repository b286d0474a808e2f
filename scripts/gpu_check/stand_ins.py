"""Stand-ins for pydantic, scipy and xxhash, so that the checks run where only torch and transformers are installed.

With the stand-in for pydantic, settings are plain objects with the defaults of their class: nothing is validated. The
one for scipy lets modules be imported that need it for statistics of evaluations, which the checks do not compute. The
one for xxhash computes the checksums of checkpoints with another function.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGES = {
    "pydantic": ("pydantic", "pydantic.fields", "pydantic_core"),
    "scipy": ("scipy", "scipy.special"),
    "xxhash": ("xxhash",),
}
"""Modules that are replaced, by the package that is missing."""


class Placeholder:
    """Any name of a missing package: it can be called, subscripted and used as a decorator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __call__(self, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        return function

    def __class_getitem__(cls, key: Any) -> type[Placeholder]:
        return cls


class FieldDefault(Placeholder):
    """The stand-in for `pydantic.Field`."""

    @property
    def value(self) -> Any:
        """The default of the field."""
        if "default_factory" in self.kwargs:
            return self.kwargs["default_factory"]()
        return self.args[0] if self.args else self.kwargs["default"]


class PlainModel:
    """The stand-in for `pydantic.BaseModel`: keyword arguments over the defaults of the class."""

    model_fields: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        names = [name for each in reversed(cls.__mro__) for name in inspect.get_annotations(each)]
        cls.model_fields = dict.fromkeys(name for name in names if name != "model_fields")

    def __init__(self, **values: Any) -> None:
        unknown = values.keys() - self.model_fields.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no setting {min(unknown)!r}")
        for name in self.model_fields:
            value = values[name] if name in values else getattr(type(self), name, None)
            setattr(self, name, value.value if isinstance(value, FieldDefault) else value)

    def model_copy(self, update: dict[str, Any]) -> PlainModel:
        """Return a copy with other values."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields}, **update})


class StandIn(ModuleType):
    """A module whose unknown names are placeholders."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = {"BaseModel": PlainModel, "Field": FieldDefault, "ConfigDict": dict}
        known |= dict.fromkeys(("PositiveInt", "NonNegativeInt"), int)
        known["from_json"] = json.loads
        known["xxh3_64"] = partial(hashlib.blake2b, digest_size=8)
        known["xxh3_64_hexdigest"] = lambda data: hashlib.blake2b(data, digest_size=8).hexdigest()
        return known.get(name, Placeholder)


def install_stand_ins() -> list[str]:
    """Replace the packages that are missing, and return their names."""
    missing = [package for package in PACKAGES if package not in sys.modules and find_spec(package) is None]
    for package in missing:
        for name in PACKAGES[package]:
            sys.modules[name] = StandIn(name)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, sys.modules[name])
    return missing
