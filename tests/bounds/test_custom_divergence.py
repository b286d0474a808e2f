"""Custom divergences: imported from the current folder, solved like built-in ones, checked with a clear error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bandpo_cli.bounds import band_bounds
from bandpo_cli.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__")  # np.log of a tensor, as a user may write it

MODULE = """
import numpy as np
def chi2(u): return (u - 1) ** 2
def tv(u): return abs(u - 1) / 2
def kl(u): return -np.log(u) + u - 1
def neyman(u): return (u - 1) ** 2 / u
def concave(u): return -((u - 1) ** 2)
def shifted(u): return u ** 2
def rough(u): return np.where(u > 50, np.nan, (u - 1) ** 2)
def scalar(u): return 0.0
def broken(u): return u.no_such_method()
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_divergences.py").write_text(MODULE)
    (tmp_path / "does_not_load.py").write_text("import nothing_of_that_name")
    monkeypatch.chdir(tmp_path)
    return "my_divergences"


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("count", [40, 10_000])
@pytest.mark.parametrize("name", ["chi2", "kl", "neyman", "tv"])
def test_a_custom_f_agrees_with_the_closed_form(module: str, name: str, count: int) -> None:
    logps = -np.geomspace(1e-6, 30, count)
    for x in (logps, torch.tensor(logps)):
        for delta in (0.01, 0.6):
            custom, built_in = band_bounds(x, f"{module}:{name}", delta), band_bounds(x, name, delta)
            for a, b in zip(custom, built_in, strict=True):
                # the f of the test loses digits near u = 1, hence not 1e-12
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_divergences:concave", "not convex"),
        ("my_divergences:shifted", r"f\(1\) must be 0 and is 1"),
        ("my_divergences:rough", "not finite at u ="),
        ("my_divergences:scalar", "shape"),
        ("my_divergences:broken", "AttributeError"),
        ("my_divergences:number", "has no function 'number'"),
        ("my_divergences:chi", r"has no function 'chi' \(did you mean 'chi2'\?\)"),
        ("does_not_load:f", "nothing_of_that_name"),
        ("no_such_module_here:f", "importing 'no_such_module_here' failed"),
    ],
)
def test_an_invalid_f_raises_config_error_with_its_name(module: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        band_bounds([-1.0], name)
    assert name in str(caught.value)
