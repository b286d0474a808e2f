"""Policy losses: the gradient of each token against a weight derived by hand, and kinship between methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import lambertw

from bandpo_cli.bounds.intervals import clip_state
from bandpo_cli.config.layers import resolve
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.loss import LossBatch, PolicyLoss, policy_loss
from bandpo_cli.methods.weights_and_gates import BapoSettings, M2poSettings
from bandpo_cli.objective.policy_objective import LossOutputs, k3, policy_objective


@dataclass(eq=False, repr=False)
class Token:
    """A token as plain numbers: log-probs in nats, advantage, its completion's tokens and share of wrong peers."""

    old: float
    new: float
    advantage: float
    completion: list[Token]
    wrong_peers: float

    @property
    def ratio(self) -> float:
        return math.exp(self.new - self.old)


def completions(seed: int = 0, spread: float = 0.5) -> list[list[Token]]:
    """Return 12 completions of 1 to 9 tokens, of every probability, with advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(12):
        tokens: list[Token] = []
        advantage = (1 if index % 2 else -1) * (0.2 + 2 * torch.rand((), generator=generator).item())
        wrong_peers = index % 5 / 4 if advantage > 0 else 0.0
        for _ in range(1 + index % 9):
            old = -8 * torch.rand((), generator=generator).item() ** 3 - 1e-3
            new = min(old + spread * torch.randn((), generator=generator).item(), -1e-4)
            tokens.append(Token(old, new, advantage, tokens, wrong_peers))
        found.append(tokens)
    return found


def tensors(
    bounds: dict[str, Any], groups: list[list[Token]], **options: Any
) -> tuple[PolicyLoss, torch.Tensor, LossBatch]:
    """Return the loss, the tokens' log-probs, and their other values in float64."""
    config = resolve([{"bounds": bounds, "objective": options}])
    loss = policy_loss(config.bounds, config.objective)
    values = [(token.old, token.new, token.advantage) for group in groups for token in group]
    old, new, advantages = torch.tensor(values, dtype=torch.float64).unbind(1)
    lengths = torch.tensor([len(group) for group in groups])
    wrong_peers = torch.tensor([group[0].wrong_peers for group in groups], dtype=torch.float64)
    columns = loss.prepare(old, advantages)
    return loss, new, LossBatch(lengths, advantages, old, columns, wrong_peers=wrong_peers)


def objective(bounds: dict[str, Any], groups: list[list[Token]], **options: Any) -> LossOutputs:
    """Return loss and gradient of the tokens in float64, each completion with the same weight."""
    loss, new, batch = tensors(bounds, groups, **options)
    weights = (1.0 / (len(groups) * batch.lengths.double())).repeat_interleave(batch.lengths)
    return policy_objective(loss, new, batch, weights)


def covariance(tokens: list[Token]) -> Callable[[Token], float]:
    """Return the function from a token to its term of the covariance of log-probs and advantages."""
    mean_logprob = sum(token.old for token in tokens) / len(tokens)
    mean_advantage = sum(token.advantage for token in tokens) / len(tokens)
    return lambda token: (token.old - mean_logprob) * (token.advantage - mean_advantage)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def clip(token: Token, low: float = 0.8, high: float = 1.2) -> float:
    """Return the ratio, or 0 for a token that the interval clips."""
    clipped = token.ratio > high if token.advantage > 0 else token.ratio < low
    return 0.0 if clipped else token.ratio


def dppo(token: Token, divergence: float, delta: float) -> float:
    away = token.ratio > 1 if token.advantage > 0 else token.ratio < 1
    return 0.0 if away and divergence > delta else min(token.ratio, 20.0)


def binary_kl(token: Token) -> float:
    p, q = math.exp(token.old), math.exp(token.new)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def sapo(token: Token) -> float:
    tau = 1.0 if token.advantage > 0 else 1.05
    gate = sigmoid(tau * (token.ratio - 1))
    return 4 * gate * (1 - gate) * token.ratio


def ce_gppo(token: Token) -> float:
    if token.advantage > 0 and token.ratio > 1.2:
        return 1.0 * 1.2
    return 0.5 * 0.8 if token.advantage < 0 and token.ratio < 0.8 else token.ratio


def aspo(token: Token) -> float:
    if clip(token) == 0:
        return 0.0
    return min(1 / token.ratio if token.advantage > 0 else token.ratio, 3.0)


def drpo(token: Token) -> float:
    change = math.exp(token.new) - math.exp(token.old)
    return token.ratio * (1 - math.copysign(1, token.advantage) * change / 12.5)


def ripo(token: Token) -> float:
    width = math.sqrt(0.05 / math.exp(token.old))
    return clip(token, max(0.5, 1 - width), min(10.0, 1 + width))


def gspo(token: Token, low: float = 3e-4, high: float = 4e-4) -> float:
    mean = sum(item.new - item.old for item in token.completion) / len(token.completion)
    ratio = math.exp(mean)
    clipped = ratio > 1 + high if token.advantage > 0 else ratio < 1 - low
    return 0.0 if clipped else ratio


def vespo(token: Token) -> float:
    product = math.exp(sum(item.new - item.old for item in token.completion))
    k, rate = (2.0, 3.0) if token.advantage > 0 else (3.0, 2.0)
    return product**k * math.exp(rate * (1 - product))


def cppo(token: Token) -> float:
    """Return the weight by algorithm 1 of the paper; its prefix threshold by section 4.1, as in UniRL."""
    completion = token.completion
    changes = [abs(math.exp(item.new) - math.exp(item.old)) for item in completion]
    prefix_threshold = min(max(float(np.quantile(changes, 0.9)), 0.02), 0.04)
    spent = total = 0.0
    for place, (item, change) in enumerate(zip(completion, changes, strict=True)):
        weight = 1 - 0.2 * place / max(1, len(completion) - 1)
        if item is token:
            threshold = min(0.15, 0.15 + prefix_threshold * total - spent)
            towards = token.advantage * (token.ratio - 1) <= 0
            return min(token.ratio, 20.0) if towards or weight * change <= threshold else 0.0
        spent, total = spent + weight * change, total + weight
    raise AssertionError("the token is in its completion")


def gmpo(token: Token) -> float:
    def clipped(item: Token) -> float:
        log_ratio = item.new - item.old
        return min(log_ratio, 0.4) if item.advantage > 0 else max(log_ratio, -0.4)

    if clipped(token) != token.new - token.old:
        return 0.0
    return math.exp(sum(map(clipped, token.completion)) / len(token.completion))


def ctpo(token: Token) -> float:
    place = next(i for i, item in enumerate(token.completion) if item is token)
    product, root = math.prod(item.ratio for item in token.completion[: place + 1]), math.sqrt(place + 1)
    if token.advantage > 0:
        return 0.0 if product > math.exp(0.05 * root) else product
    return product if math.exp(-0.025 * root) <= product <= math.exp(0.05 * root) else 0.0


def topr(token: Token) -> float:
    if token.advantage > 0:
        return 1.0
    return min(math.exp(sum(item.new - item.old for item in token.completion)), 1.0)


def dgpo(token: Token) -> float:
    if token.advantage > 0:
        return math.sqrt(token.ratio * 1.2) if token.ratio > 1.2 else token.ratio
    return token.ratio**2 / 0.8 if token.ratio < 0.8 else token.ratio


def vaco(token: Token) -> float:
    distance = sum(abs(item.ratio - 1) for item in token.completion) / len(token.completion)
    away = token.ratio > 1 if token.advantage > 0 else token.ratio < 1
    return 0.0 if distance > 0.05 and away else token.ratio


BY_HAND: dict[str, Callable[[Token], float]] = {
    "none": lambda token: token.ratio,
    "clip": clip,
    "dppo kl": lambda token: dppo(token, binary_kl(token), 0.05),
    "dppo tv": lambda token: dppo(token, abs(math.exp(token.new) - math.exp(token.old)), 0.15),
    "cispo": lambda token: min(token.ratio, 5.0),
    "sapo": sapo,
    "ripo": ripo,
    "atr": lambda token: clip(token, *(-lambertw(-math.exp(-1.05), branch).real for branch in (0, -1))),
    "ctpo": ctpo,
    "dgpo": dgpo,
    "vaco": vaco,
    "bapo": lambda token: clip(token, 0.6, 1.2),  # the interval at the start
    "m2po": lambda token: token.ratio,  # without the sampler's log-probs
    "wapo": lambda token: token.ratio if token.advantage > 0 and token.ratio <= 10 else 0.0,
    "gspo": gspo,
    "luspo": lambda token: len(token.completion) * gspo(token, 2e-3, 2.5e-3),
    "gapo": lambda token: gspo(token, 3e-3, 3e-3 + 2e-3 * token.wrong_peers),
    "vespo": vespo,
    "cppo": cppo,
    "gmpo": gmpo,
    "ce-gppo": ce_gppo,
    "aspo": aspo,
    "drpo": drpo,
    "topr": topr,
}


@pytest.mark.parametrize("spread", [0.02, 2.0])
@pytest.mark.parametrize("name", BY_HAND)
def test_the_gradient_weight_is_the_one_derived_by_hand(name, spread):
    method, _, divergence = name.partition(" ")
    bounds = {"method": method} | ({"divergence": divergence} if divergence else {})
    groups = completions(spread=spread)
    found = objective(bounds, groups, dual_clip=None)
    expected = [BY_HAND[name](token) for group in groups for token in group]
    assert found.gradient_weights.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    factors = [-token.advantage / len(groups) / len(group) for group in groups for token in group]
    gradients = [weight * factor for weight, factor in zip(expected, factors, strict=True)]
    assert found.gradient.tolist() == pytest.approx(gradients, rel=1e-9, abs=1e-12)


def test_clip_cov_removes_the_gradient_of_some_tokens_in_the_range():
    groups = completions()
    tokens = [token for group in groups for token in group]
    bounds = {"method": "clip-cov", "share": 0.1, "cov_low": 0.5, "cov_high": 3.0}
    weights = objective(bounds, groups).gradient_weights.tolist()
    expected = [clip(token, 0.0, 2.0) for token in tokens]
    triples = [*zip(tokens, weights, expected, strict=True)]
    removed = [token for token, weight, other in triples if weight == 0 and other != 0]
    assert 2 <= len(removed) <= int(0.1 * len(tokens))  # the interval clips some of them at this update
    assert all(0.5 < covariance(tokens)(token) < 3.0 for token in removed)
    kept = [(weight, other) for token, weight, other in triples if token not in removed]
    assert [weight for weight, _ in kept] == pytest.approx([other for _, other in kept])


@pytest.mark.parametrize("share", [0.1, 1e-4])
def test_kl_cov_penalizes_the_tokens_of_highest_covariance(share):
    """A share of less than one token is one token."""
    groups = completions()
    tokens = [token for group in groups for token in group]
    found = objective({"method": "kl-cov", "share": share, "kl_coef": 0.7}, groups)
    ranked = sorted(tokens, key=covariance(tokens), reverse=True)
    chosen = ranked[: max(1, int(share * len(tokens)))]
    penalties = [0.7 * math.copysign(1, token.new - token.old) / token.advantage for token in tokens]
    expected = [t.ratio - penalty * (t in chosen) for t, penalty in zip(tokens, penalties, strict=True)]
    assert found.gradient_weights.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("threshold", "kept"), [(0.04, [2, 3, 5]), (0.2, [0, 2, 3, 5]), (1e-9, [5]), (9, range(6))]
)
def test_m2po_keeps_the_tokens_whose_mean_squared_log_ratio_to_the_sampler_is_below(threshold, kept):
    """The squares are 0.64, 4, 0.09, 0.01, 1, 0: the means without the largest are 0.96, 0.348, 0.185, 0.033, ..."""
    gaps = torch.tensor([0.8, -2.0, 0.3, -0.1, 1.0, 1e-3], dtype=torch.float64)
    settings = M2poSettings(threshold=threshold)
    sampler = torch.full_like(gaps, -3.0)
    columns = settings.prepare(sampler + gaps, torch.ones_like(gaps), sampler)
    assert columns["kept"].nonzero().flatten().tolist() == [*kept]


@pytest.mark.parametrize(
    ("share", "interval"),
    # With a = 1, −1 and r = 1.9, 0.5 the gain is min(1.9, high) and the loss max(0.5, low), which also rises.
    [(0.6, (0.6, 1.2)), (0.66, (0.6, 1.2)), (0.67, (0.8, 1.65)), (0.7, (0.8, 1.9)), (0.9, (0.8, 2.0))],
)
def test_bapo_raises_the_lower_bound_and_then_the_upper_bound(share, interval):
    old = torch.full((3,), -4.0, dtype=torch.float64)
    new = old + torch.tensor([1.9, 0.5, 100.0], dtype=torch.float64).log()
    batch = LossBatch(torch.tensor([1, 2]), torch.tensor([1.0, -1.0, 0.0]).double(), old)
    columns = BapoSettings(share=share).adapt(batch, new)
    assert (columns["lower"][0].item(), columns["upper"][0].item()) == pytest.approx(interval)


def test_vaco_measures_the_distance_to_the_sampler():
    """Only the first completion has left the sampler, and only its second token moves away, as its ρ is below 1."""
    loss, new, batch = tensors({"method": "vaco", "delta": 0.33}, completions()[2:4])
    rho = torch.tensor([1.4, 0.6, 1.2, 1.5, 0.9, 1.1, 1.6], dtype=torch.float64)
    batch = replace(
        batch, sampler_logprobs=new - rho.log(), advantages=torch.tensor([-1.0] * 3 + [2.0] * 4).double()
    )
    weights = policy_objective(loss, new, batch, torch.ones_like(new)).gradient_weights
    ratios = batch.ratios(new).tolist()
    # The means of |ρ − 1| are 0.333 and 0.325.
    assert weights.tolist() == pytest.approx([ratios[0], 0, *ratios[2:]])


@pytest.mark.parametrize(("divergence", "delta"), [("kl", 0.05), ("kl", 0.01), ("tv", 0.15), ("tv", 0.05)])
@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_without_caps_the_gradient_of_dppo_is_the_bands(divergence, delta, spread):
    """The Band is the interval, DPPO the mask: a token is outside the trust region where its ratio is outside it."""
    groups = [group for seed in range(12) for group in completions(seed, spread)]
    region = {"divergence": divergence, "delta": delta}
    band = objective({"method": "band", "max_ratio": None, **region}, groups, dual_clip=None)
    mask = objective({"method": "dppo", "max_weight": None, **region}, groups)
    assert (band.gradient == 0).any()
    torch.testing.assert_close(mask.gradient, band.gradient, rtol=1e-12, atol=0)


def test_with_one_known_probability_a_predictive_divergence_mask_is_that_of_dppo():
    """The reason why docs/methods.md leaves the method out.

    The step of a token raises KL(π_old‖π) to first order by a·(π − π_old − Σ π_i·(π_i − π_old,i)) (arXiv 2607.10848).
    Of the sum over the vocabulary only the token's own term is known. The rest is one outcome (aggregated tail), or
    equal over `others` tokens (uniform tail).
    """
    rng = np.random.default_rng(0)
    old, new = rng.beta(0.4, 0.4, (2, 20_000)).clip(1e-6, 1 - 1e-6)
    for others in (1, 50_000):
        rest = (1 - new) * (old - new) / others
        change = new - old - (new * (new - old) + rest)
        assert (np.sign(change) == np.sign(new - old)).all()


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_of_complete_completions_give_the_same_gradient(method):
    groups = completions()
    loss, new, batch = tensors({"method": method}, groups)
    weights = torch.rand(len(new), generator=torch.Generator().manual_seed(0))
    complete = policy_objective(loss, new, batch, weights)
    gradients, start = [], 0
    for index, length in enumerate(batch.lengths.tolist()):
        span, peers = slice(start, start + length), batch.wrong_peers[[index]]
        columns = {name: column[span] for name, column in batch.columns.items()}
        values = batch.advantages[span], batch.old_logprobs[span]
        part = LossBatch(torch.tensor([length]), *values, columns, wrong_peers=peers)
        gradients.append(policy_objective(loss, new[span], part, weights[span]).gradient)
        start += length
    torch.testing.assert_close(torch.cat(gradients), complete.gradient, rtol=1e-5, atol=1e-7)


log_prob = st.floats(-1e4, 0.0, width=32)
extreme_token = st.tuples(log_prob, log_prob | st.just(-math.inf), st.floats(-1e6, 1e6, width=32), log_prob)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=settings().max_examples // 6)
@given(rows=st.lists(extreme_token, min_size=2, max_size=8), dual_clip=st.sampled_from([None, 3.0]))
@example(rows=[(0.0, -math.inf, 1e6, -1e4), (0.0, -1e4, -1e6, 0.0)], dual_clip=None)
@example(rows=[(-1e4, 0.0, 1e6, 0.0), (0.0, -math.inf, 0.0, -1e4)], dual_clip=3.0)
def test_finite_inputs_give_a_finite_result(method, rows, dual_clip):
    """In float32: log-probs down to −1e4, an old one of −inf too, advantages of ±1e6, a penalty to a reference."""
    config = resolve([{"bounds": {"method": method}, "objective": {"dual_clip": dual_clip}}])
    loss = policy_loss(config.bounds, config.objective)
    new, old, advantages, ref = torch.tensor(rows, dtype=torch.float32).unbind(1)
    lengths, weights = torch.tensor([1, len(rows) - 1]), torch.full((len(rows),), 0.5)
    columns, wrong_peers = loss.prepare(old, advantages), torch.tensor([1.0, 0.3])
    batch = LossBatch(lengths, advantages, old, columns, None, ref, wrong_peers)
    out = policy_objective(loss, new, batch, weights)
    for values in (out.loss, out.ratios, out.gradient, out.gradient_weights, k3(new, old)):
        assert torch.isfinite(values).all()


@pytest.mark.parametrize(
    ("method", "interval"),
    [("ce-gppo", (0.8, 1.2)), ("aspo", (0.8, 1.2)), ("clip-cov", (0.0, 2.0)), ("sapo", None)],
)
def test_tokens_outside_a_fixed_interval_are_counted(method, interval):
    config = resolve([{"bounds": {"method": method}}])
    ratios = torch.tensor([0.5, 0.79, 0.81, 1.19, 1.21, 2.5])
    state = policy_loss(config.bounds, config.objective).clip_state(
        {}, ratios, torch.ones(6), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    )
    assert state.at_upper.tolist() == [False, True, False, False, True, False]
    expected = interval and [not interval[0] <= ratio <= interval[1] for ratio in ratios.tolist()]
    assert (None if state.outside is None else state.outside.tolist()) == expected


def many_completions(spread: float) -> list[list[Token]]:
    return [completion for seed in range(8) for completion in completions(seed, spread)]


@pytest.mark.parametrize("spread", [0.1, 2.0])
@pytest.mark.parametrize("method", [name for name, entry in METHODS.items() if not entry.without_bounds])
def test_the_gradient_is_zero_beyond_the_bounds(method, spread):
    """Clip-Cov removes further gradients."""
    groups = many_completions(spread)
    out = objective({"method": method}, groups, dual_clip=None)
    loss, _, batch = tensors({"method": method}, groups)
    bounds = loss.settings.ratio_bounds()(batch.old_logprobs)
    beyond = clip_state(out.ratios, *bounds, batch.advantages).active
    if METHODS[method].differs_at_ratio_one:
        assert ((out.gradient == 0) | ~beyond).all()
        assert ((out.gradient == 0) & ~beyond).sum() <= 1  # 0.02% of the tokens, at least one
    else:
        assert torch.equal(out.gradient == 0, beyond)


@pytest.mark.parametrize("method", METHODS)
def test_the_methods_that_differ_at_ratio_one_are_named(method):
    """The policy gradient, −weight·advantage, is that of every other method: with one update they are one run."""
    groups = many_completions(0.0)
    found = objective({"method": method}, groups, dual_clip=None).gradient
    plain = [-token.advantage / len(groups) / len(group) for group in groups for token in group]
    is_plain = found.tolist() == pytest.approx(plain, rel=1e-6, abs=1e-12)
    assert is_plain != METHODS[method].differs_at_ratio_one
    assert is_plain or method != "none"
