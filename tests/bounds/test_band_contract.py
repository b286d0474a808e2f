"""Properties of all Bands: order of the bounds, shapes, types, devices, and the handling of NaN and infinities."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.bounds import RatioBounds, band_bounds
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import DIVERGENCES

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__")  # np.log of a tensor, as a user may write it

NAMES = st.sampled_from(list(DIVERGENCES))
BATCH = 10_000


@given(name=NAMES, logp=st.floats(-200, 0), delta=st.floats(1e-6, 10), factor=st.floats(1.01, 3))
def test_bounds_are_ordered_and_a_larger_radius_widens_them(name, logp, delta, factor):
    (lower,), (upper,) = band_bounds([logp], name, delta)
    (lowest,), (highest,) = band_bounds([logp], name, delta * factor)
    assert 0 <= lowest <= lower * (1 + 1e-12) <= 1 + 1e-12
    assert 1 <= upper <= highest * (1 + 1e-12) <= math.exp(-logp) * (1 + 2e-12)


@pytest.mark.parametrize("count", [1, BATCH])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_nan_infinite_and_positive_log_probs(name, count):
    odd = torch.tensor([math.nan, 1e-4, 0.0, -math.inf, -1e4])
    for dtype in (torch.float64, torch.float32):
        lower, upper = band_bounds(torch.cat([odd, torch.full((count,), -1.0)]).to(dtype), name, 0.05)
        assert not (lower.isnan() | upper.isnan()).any()
        assert (lower[0], upper[0]) == (1.0, 1.0)
        assert lower[1] == lower[2]
        assert upper[1] == upper[2] == 1.0
        assert lower[3] == lower[4] == pytest.approx(0.0, abs=1e-30)
        assert upper[3] == math.inf


@pytest.mark.parametrize("name", ["kl", "tv", "js"])
def test_shapes_and_dtypes(name):
    wanted = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32}
    for given_type, returned in (wanted | {torch.float64: torch.float64}).items():
        for shape in ((), (0,), (2, 0, 3), (2, 3, 4)):
            bounds = band_bounds(-torch.rand(shape, dtype=torch.float32).to(given_type), name, 0.1)
            assert isinstance(bounds, RatioBounds)
            assert [b.shape for b in bounds] == [shape, shape]
            assert {b.dtype for b in bounds} == {returned}
    assert band_bounds(np.float32([-1.0]), name).lower.dtype == np.float32
    for values in (-1, [-2, -1, 0], (-2.0, 0.0), torch.tensor([-2, 0])):
        assert str(band_bounds(values, name).lower.dtype).endswith("float64")
    assert band_bounds(-torch.rand(6, 4).T[::2], name).upper.shape == (2, 6)


def test_no_gradient_is_recorded_and_the_input_is_not_modified():
    x = torch.tensor([-1.0, math.nan, 1e-6], requires_grad=True)
    before = x.detach().clone()
    assert not band_bounds(x).upper.requires_grad
    torch.testing.assert_close(x.detach(), before, equal_nan=True)


@pytest.mark.parametrize("name", ["kl", "js"])
def test_tables_created_in_inference_mode_are_usable_outside(name):
    x = -torch.rand(BATCH)
    with torch.inference_mode():
        inside = band_bounds(x, name, 0.0625)
    assert torch.equal(inside.upper, band_bounds(x, name, 0.0625).upper)


@pytest.mark.parametrize(("name", "dtype"), [("kl", torch.float32), ("js", torch.float64)])
def test_bounds_do_not_depend_on_the_blocks(name, dtype, monkeypatch):
    """A batch processed in several blocks has the bounds of the same batch processed in one."""
    x = -torch.logspace(-9, 1.9, 3 * BATCH - 7, dtype=dtype)
    at_once = band_bounds(x, name, 0.05)
    monkeypatch.setattr("bandpo_cli.bounds.arrays.CPU_BLOCK", BATCH)
    rtol = 2e-12 if dtype == torch.float64 else 3e-7
    for in_blocks, expected in zip(band_bounds(x, name, 0.05), at_once, strict=True):
        torch.testing.assert_close(in_blocks, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("delta", value) for value in (0.0, math.nan, math.inf, "0.05", b"1", None, True, [0.1, 0.2], 1j)),
        *(("max_ratio", value) for value in (1.0, -2.0, math.nan, "10", True, [10.0, 2.0])),
        *(("divergence", value) for value in (None, ["kl"], b"kl")),
        *(("old_logprobs", value) for value in ("x", None, ["a"], [True], [[-1.0], [-1.0, -2.0]], {"a": 1})),
        *(("old_logprobs", torch.tensor([value])) for value in (True, -1j)),
        ("old_logprobs", [torch.zeros(2), torch.zeros(3)]),
    ],
)
def test_a_wrong_argument_raises_an_error_that_names_it(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}") as caught:
        band_bounds(**{"old_logprobs": [-1.0], name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [0.05, np.float32(0.05), np.array(0.05), torch.tensor(0.05)])
def test_numbers_of_numpy_and_torch_are_accepted(number):
    expected = band_bounds([-1.0], "tv", float(number), float(number) + 2).upper
    assert band_bounds([-1.0], "tv", number, number + 2).upper == expected


@pytest.mark.parametrize(
    ("dtype", "rounding", "too_much"),
    [(torch.float64, 5e-5, 2e-3), (torch.float32, 5e-5, 2e-3), (torch.float16, 0.06, 1.5), (torch.bfloat16, 0.5, 1.5)],
)  # fmt: skip
def test_values_above_zero_are_accepted_where_rounding_explains_them(dtype, rounding, too_much):
    """The accepted ones are the largest that separate matrix products gave for logits of about 100."""
    lower, upper = band_bounds(torch.tensor([-1.0, rounding], dtype=dtype))
    assert (lower[1], upper[1]) == tuple(band_bounds(torch.zeros(1, dtype=dtype)))
    for count in (0, 1, 5000):  # tokens that the policy is certain of may all be above 0 by a rounding
        assert band_bounds(torch.full((count,), 1e-6, dtype=dtype)).upper.eq(1.0).all()
    probabilities = torch.tensor([0.01, 0.08, math.nan, 0.9], dtype=dtype)
    band_bounds(probabilities.log())
    for wrong in (torch.tensor([-1.0, too_much], dtype=dtype), probabilities, probabilities.double().numpy()):
        with pytest.raises(ConfigError, match=r"at most 0; pass log π_old\(token\), not probabilities"):
            band_bounds(wrong)


def test_an_unknown_name_raises_config_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"'helinger' is not known \(did you mean 'hellinger'\?\)"):
        band_bounds([-1.0], "helinger")


@pytest.mark.parametrize(("name", "count"), [("kl", 9000), ("tv", 5), ("kl", 5), ("js", 9000)])
def test_bands_read_no_value_from_a_device(name, count, monkeypatch):
    """Reading a value from the meta device raises an error. The steps of the solvers are all alike."""
    monkeypatch.setattr("bandpo_cli.bounds.solver._MAX_STEPS", 2)
    monkeypatch.setattr("bandpo_cli.bounds.band._NEWTON_STEPS", 2)
    for bound in band_bounds(torch.empty(count, device="meta"), name, 0.07, max_ratio=10.0):
        assert (bound.device.type, bound.shape) == ("meta", (count,))


@pytest.mark.parametrize("name", ["js", "kl"])
def test_the_accelerator_path_gives_the_same_bounds(name, monkeypatch):
    """On an accelerator the solver runs all its steps; the test runs that path on the CPU."""
    x = -torch.logspace(-9, 1.8, BATCH, dtype=torch.float64)
    usual = band_bounds(x, name, 0.05)
    for module in ("arrays", "solver"):
        monkeypatch.setattr(f"bandpo_cli.bounds.{module}.is_on_host", lambda x: False)
    for bound, expected in zip(band_bounds(x, name, 0.05), usual, strict=True):
        torch.testing.assert_close(bound, expected, rtol=1e-11, atol=1e-12)


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
def test_a_custom_f_agrees_with_the_closed_form(module, name, count):
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
def test_an_invalid_f_raises_config_error_with_its_name(module, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        band_bounds([-1.0], name)
    assert name in str(caught.value)
