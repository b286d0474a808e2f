"""Custom methods: bounds and losses of a user's code, their options, and messages about mistakes in them."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments.plan import callback_class
from bandpo_cli.methods.loss import LossBatch, policy_loss
from bandpo_cli.methods.settings import CustomSettings
from bandpo_cli.objective.advantages import check_estimator
from bandpo_cli.objective.custom_methods import check_method
from bandpo_cli.objective.policy_objective import policy_objective

INTERVAL, GATE = "examples.custom_interval:log_interval", "examples.custom_loss:SmoothGate"
OBJECTIVE = ObjectiveConfig()

CODE = """from pydantic import BaseModel
from bandpo_cli.methods.loss import PolicyLoss

def constant(old_logprobs):
    return 0.8, 1.28

def required(old_logprobs, width):
    return 1 - width, 1 + width

class NoLoss:
    pass

class Abstract(PolicyLoss):
    pass

class Scalar(PolicyLoss):
    def token_losses(self, logprobs, batch):
        return logprobs.sum()

class Constant(PolicyLoss):
    def token_losses(self, logprobs, batch):
        return -batch.advantages

class Infinite(PolicyLoss):
    def token_losses(self, logprobs, batch):
        return logprobs / 0

class Typo(PolicyLoss):
    def token_losses(self, logprobs, batch):
        return batch.ratio(logprobs)

class Column(PolicyLoss):
    def prepare(self, old_logprobs, advantages):
        return {"mean": old_logprobs.mean()}

    def token_losses(self, logprobs, batch):
        return logprobs * batch.columns["mean"]

class PlainOptions(PolicyLoss):
    class Options:
        tau = 1.0

    token_losses = Scalar.token_losses

one = lambda old_logprobs: old_logprobs
nan = lambda old_logprobs: (old_logprobs * float("nan"), 1.2)
above = lambda old_logprobs: (1.1, 1.2)
short = lambda old_logprobs: (old_logprobs[:2], 1.2)
typo = lambda old_logprobs: old_logprobs.epx()
"""


@pytest.fixture(autouse=True)
def _code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_methods.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)


def test_a_function_gives_bounds_of_the_type_of_the_log_probs():
    """u = 1 + 0.2·(1 + log 10) at p = 0.1, for NumPy and torch; NaN has the bounds of p = 1."""
    bounds = CustomSettings(method=INTERVAL, options={"eps": 0.2}).ratio_bounds()
    upper = 1 + 0.2 * (1 + math.log(10))
    found = bounds(np.log([[0.1, 1.0]]))
    assert isinstance(found.upper, np.ndarray)
    assert found.upper.tolist() == [pytest.approx([upper, 1.2], rel=1e-12)]
    assert found.lower.tolist() == [pytest.approx([1 / upper, 1 / 1.2], rel=1e-12)]
    narrow = bounds(torch.tensor([math.log(0.1), math.nan, 1e-8]))
    assert narrow.upper.dtype == torch.float32
    assert narrow.upper.tolist() == pytest.approx([upper, 1.2, 1.2], rel=1e-6)
    constant = CustomSettings(method="custom_methods:constant").ratio_bounds()(torch.tensor([-1.0, -2.0]))
    assert constant.upper.tolist() == pytest.approx([1.28, 1.28])


def test_a_loss_has_the_gradient_weights_of_its_formula():
    """w = r·exp(−(log r)²/2b²), by hand in float64, with an option that differs from the default."""
    config = resolve([{"bounds": {"method": GATE, "options": {"width": 0.5}}}])
    old, new = -torch.rand(2, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    advantages = torch.where(torch.arange(40) % 3 == 0, -1.5, 0.5).double()
    batch = LossBatch(torch.tensor([15, 25]), advantages, old)
    outputs = policy_objective(
        policy_loss(config.bounds, config.objective), new, batch, torch.full((40,), 0.025)
    )
    for log_r, weight in zip((new - old).tolist(), outputs.gradient_weights.tolist(), strict=True):
        assert weight == pytest.approx(math.exp(log_r - log_r**2 / 0.5), rel=1e-6)


def test_a_check_returns_the_settings_with_all_options():
    for method, options in (
        (INTERVAL, {"eps": 0.1}),
        (GATE, {"width": 0.4}),
        ("custom_methods:constant", {}),
    ):
        checked = check_method(CustomSettings(method=method), OBJECTIVE)
        assert checked.options == options
        assert resolve([{"bounds": checked.model_dump()}]).bounds == checked
    assert CustomSettings(method=GATE, options={"width": 1.0}).slug() == "examples-custom_loss-SmoothGate"


MISTAKES = {
    "NoLoss": r"the class is no PolicyLoss; derive it .* a function of the bounds \(custom_methods.py:10, in NoLoss",
    "Abstract": r"the class defines no token_losses\(logprobs, batch\) \(custom_methods.py:13, in Abstract\)",
    "Scalar": r"token_losses must have a value per token, shape \[5\] .* not \[\] \(custom_methods.py:16, in Scalar",
    "Constant": r"token_losses has no gradient: .* from the argument logprobs \(custom_methods.py:20, in Constant\)",
    "Infinite": r"the losses \[-inf, .* or their gradients are not finite \(custom_methods.py:24, in Infinite\)",
    "Typo": r"AttributeError: 'LossBatch' object has no attribute 'ratio' \(custom_methods.py:30, in token_losses\)",
    "Column": r"mean must have a value per token, .* not \[\]",
    "PlainOptions": r"its Options must be a subclass of pydantic.BaseModel",
    "Nothing": r"module 'custom_methods' has no function 'Nothing'",
    "one": r"it must return \(lower, upper\), not a Tensor \(custom_methods.py:45, in <lambda>\)",
    "nan": r"lower = nan and upper = 1.2 for a token of probability 1e-09; 0 ≤ lower ≤ 1 ≤ upper is required \(c",
    "above": r"returned lower = 1.1 and upper = 1.2",
    "short": r"must return bounds of the shape of log π_old, \[10\], not \[2\] \(custom_methods.py:48, in <lambda>\)",
    "typo": r"AttributeError: .*epx.* \(custom_methods.py:49, in <lambda>",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_the_line_of_the_code(name):
    with pytest.raises(ConfigError, match=f"^bounds.method = 'custom_methods:{name}': .*{MISTAKES[name]}"):
        check_method(CustomSettings(method=f"custom_methods:{name}"), OBJECTIVE)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            GATE,
            {"widht": 1},
            r"bounds.options.widht: no such setting of '.*' \(did you mean 'width'\?\); known: width",
        ),
        (GATE, {"width": -1}, "bounds.options.width = -1: input should be greater than 0"),
        (INTERVAL, {"eps": "x"}, "bounds.options.eps = 'x': input should be a valid number"),
        (INTERVAL, {"epsilon": 1}, r"epsilon: no such setting of '.*' \(did you mean 'eps'\?\); known: eps"),
        ("custom_methods:constant", {"eps": 1}, "known: none"),
        (
            "custom_methods:required",
            {},
            "bounds.options.width: no value is given; add --set bounds.options.width=",
        ),
    ],
)
def test_mistakes_in_options_name_the_key(method, options, message):
    with pytest.raises(ConfigError, match=message):
        check_method(CustomSettings(method=method, options=options), OBJECTIVE)


def test_a_class_has_no_interval():
    with pytest.raises(ConfigError, match="SmoothGate has no interval of ratios: it is a class"):
        CustomSettings(method=GATE).ratio_bounds()


def test_the_extensions_in_contributing_can_be_used(tmp_path):
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "# mine.py" in block
    )
    (tmp_path / "extensions_of_contributing.py").write_text(code)
    for name, options in (("interval", {"eps": 0.1}), ("Gate", {"width": 0.4})):
        method = f"extensions_of_contributing:{name}"
        assert check_method(CustomSettings(method=method), OBJECTIVE).options == options
    check_estimator(ObjectiveConfig(advantages="extensions_of_contributing:half_centred"))
    assert callback_class("extensions_of_contributing:Print")
    with pytest.raises(
        ConfigError, match=r"tracking.callbacks = '.*:Gate': no callback; name a subclass of .* in Gate"
    ):
        callback_class("extensions_of_contributing:Gate")
    with pytest.raises(ConfigError, match=r"tracking.callbacks = 'Print': write it as module:name"):
        callback_class("Print")
