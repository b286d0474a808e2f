"""Policy losses compared with those of the installed verl and TRL: loss and gradient on random padded batches.

Aggregation weights are float32 here, the references add 1e-8 to some denominators, and TRL's τ of SAPO is a float32
number.
"""

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bandpo_cli.exports.from_trainers import Translation
from bandpo_cli.methods.weights_and_gates import token_covariance
from bandpo_cli.objective.policy_objective import LossOutputs, entropy_threshold
from tests.integrations import batches
from tests.integrations.batches import SPREADS, Batch, assert_equal, ours, random_batch, trl_config
from tests.integrations.stand_ins import partial_package

SEEDS = range(2)
Reference = Callable[[Tensor], Tensor]
"""A function from log-probs [B, T] to the scalar loss."""


def compare(case: str, found: LossOutputs, batch: Batch, reference: Reference) -> None:
    """Assert that loss and gradient are equal, and that the reference has no gradient at padding."""
    logprobs = batch.new.clone().requires_grad_()
    loss = reference(logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert_equal(case, found, loss, gradient, batch.mask)


# ---- verl ------------------------------------------------------------------------------------------------------------


class ActorConfig(SimpleNamespace):
    """Stands for verl's ActorConfig, whose module imports most of verl: attributes, and `get` with a default."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


VerlLoss = Callable[..., tuple[Tensor, dict[str, Any]]]


@pytest.fixture(scope="module")
def verl_losses():
    """Return verl's registered policy losses by name."""
    folders = ["verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers"]
    annotations = {"omegaconf": {"DictConfig": dict}, "verl.workers.config": {"ActorConfig": ActorConfig}}
    with partial_package("verl", folders, annotations):
        groupwise = importlib.import_module("verl.utils.groupwise")
        for name in ("as_torch_index", "group_mean_std"):
            setattr(sys.modules["verl.utils"], name, getattr(groupwise, name))
        algos = importlib.import_module("verl.trainer.ppo.core_algos")
    return algos.POLICY_LOSS_REGISTRY


def verl_reference(loss: VerlLoss, batch: Batch, aggregation: str, **config: Any) -> Reference:
    """Return verl's loss as a function of the log-probs."""
    actor = ActorConfig(**{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None} | config)
    actor.global_batch_info = {}

    mask = batch.mask.double()
    return lambda logprobs: loss(batch.old, logprobs, batch.advantages, mask, aggregation, actor)[0]


# test_verl_export.py compares the other losses of verl, with the settings of an exported folder.
# verl chooses the tokens of Clip-Cov and KL-Cov by the covariance under π, ours by that under π_old. The following
# tests give our choice verl's covariance, so that everything but this departure is compared.


def covariance_config(**settings: float) -> dict[str, Any]:
    """Return verl's settings of both methods."""
    unset = dict.fromkeys(("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef"))
    return {"policy_loss": SimpleNamespace(**unset | settings)}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("share", [2e-4, 0.02, 0.3])
def test_verl_kl_cov(share, spread, verl_losses):
    settings = {"method": "kl-cov", "share": share, "kl_coef": 0.7}
    config = covariance_config(kl_cov_ratio=share, ppo_kl_coef=0.7)
    for seed in SEEDS:
        batch = random_batch(seed, SPREADS[spread])
        covariance = token_covariance(batch.new[batch.mask], batch.advantages[batch.mask])
        penalized = lambda loss, by=covariance: {"penalized": loss.settings.choose(by)}  # noqa: E731
        found = ours(batch, settings, "token-mean", columns=penalized).outputs
        reference = verl_reference(verl_losses["kl_cov"], batch, "token-mean", **config)
        compare(f"verl kl_cov, share {share:g}, {spread}", found, batch, reference)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("eps", [(0.2, 0.28), (1.0, 1.0)])
def test_verl_clip_cov(eps, spread, verl_losses):
    """With a share of 1 all tokens in the range are chosen; which of them a smaller share has is random in both."""
    settings = {"method": "clip-cov", "share": 1.0, "cov_low": 0.2, "cov_high": 3.0}
    settings |= {"eps_low": eps[0], "eps_high": eps[1]}
    config = covariance_config(clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=3.0)
    config |= {"clip_ratio_low": eps[0], "clip_ratio_high": eps[1]}
    for seed in SEEDS:
        batch = random_batch(seed, SPREADS[spread])
        new, old, advantages = (t[batch.mask] for t in (batch.new, batch.old, batch.advantages))
        ratios = (new - old).exp()
        clipped = torch.where(advantages > 0, ratios > 1 + eps[1], (ratios < 1 - eps[0]) & (advantages < 0))
        covariance = token_covariance(new, advantages).masked_fill(clipped, -torch.inf)
        kept = lambda loss, by=covariance: {"kept": loss.settings.choose(by)}  # noqa: E731
        found = ours(batch, settings, "token-mean", columns=kept).outputs
        assert (found.gradient_weights == 0).any()
        reference = verl_reference(verl_losses["clip_cov"], batch, "token-mean", **config)
        compare(f"verl clip_cov, ε {eps}, {spread}", found, batch, reference)


@pytest.mark.parametrize("share", [2e-4, 0.02, 0.05])
def test_verl_clip_cov_removes_as_many_tokens(share, verl_losses):
    """At π = π_old both covariances are the same, and `prepare` itself is compared: the tokens' number and range."""
    torch.manual_seed(0)  # verl chooses at random
    settings = {"method": "clip-cov", "share": share, "cov_low": 0.2, "cov_high": 3.0}
    config = covariance_config(clip_cov_ratio=share, clip_cov_lb=0.2, clip_cov_ub=3.0)
    for seed in SEEDS:
        batch = random_batch(seed, spread=0.0)
        advantages = batch.advantages[batch.mask]
        weighted = advantages != 0
        logprobs = batch.new.clone().requires_grad_()
        loss = verl_reference(verl_losses["clip_cov"], batch, "token-mean", **config)(logprobs)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        removed = (ours(batch, settings, "token-mean").outputs.gradient == 0) & weighted
        verl_removed = (gradient[batch.mask] == 0) & weighted
        covariance = token_covariance(batch.old[batch.mask], advantages)
        candidates = (covariance > 0.2) & (covariance < 3.0)
        assert removed.sum() <= max(1, int(share * len(advantages)))
        assert not ((removed | verl_removed) & ~candidates).any()
        if not (candidates & ~weighted).any():
            assert removed.sum() == verl_removed.sum() > 0


# ---- TRL -------------------------------------------------------------------------------------------------------------


SEQUENCE = {"importance_sampling_level": "sequence"}
TRL = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 40},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo with delta": {"delta": 3.0},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 0.9},
    "gspo": {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4, **SEQUENCE},
    "gspo wide": {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.2, **SEQUENCE},
    "luspo": {"loss_type": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3, **SEQUENCE},
    "vespo": {"loss_type": "vespo"},
    "vespo with other settings": {
        "loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_k_neg": 2.5, "vespo_lambda_neg": 0.7,
    },
}  # fmt: skip
"""TRL's settings, whose translation (`bandpo configs --from trl`) has the same loss."""


def trl_reference(args: Any, batch: Batch, entropies: Tensor | None = None, **inputs: Tensor) -> Reference:
    """Return TRL's loss as a function of the log-probs."""
    from trl import GRPOTrainer

    def reference(logprobs: Tensor) -> Tensor:
        trainer = batches.trl_trainer(GRPOTrainer, args, logprobs, entropies=entropies)
        return torch.as_tensor(trainer._compute_loss(None, batches.trl_inputs(batch) | inputs))

    return reference


def reference_logprobs(batch: Batch) -> Tensor:
    """Return log-probs under a reference model, [B, T]."""
    return batch.old + 0.3 * torch.sin(torch.arange(batch.old.numel()).reshape(batch.old.shape))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("case", TRL)
def test_trl(case, spread, tmp_path):
    trl = pytest.importorskip("trl")
    settings = TRL[case]
    translated = Translation("trl", {"num_processes": 1} | settings).layer()
    objective = {"aggregation": "seq-mean-token-mean", "dual_clip": 10.0} | translated["objective"]
    args = trl_config(trl.GRPOConfig, tmp_path, **settings)
    for seed in SEEDS:
        batch = random_batch(seed, SPREADS[spread])
        found = ours(batch, translated["bounds"], objective["aggregation"], objective["dual_clip"]).outputs
        compare(f"TRL {case}, {spread}", found, batch, trl_reference(args, batch))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kl", [False, True])
def test_trl_off_policy_mask_and_unbiased_penalty(kl, spread, tmp_path):
    trl = pytest.importorskip("trl")
    settings = {"off_policy_mask_threshold": 0.1, "use_bias_correction_kl": kl, "loss_type": "grpo"}
    args = trl_config(trl.GRPOConfig, tmp_path, beta=0.3, **settings)
    estimator = "unbiased" if kl else "k3"
    terms = {"off_policy_mask": 0.1, "reference_kl": 0.3, "reference_kl_estimator": estimator}
    dropped = []
    for seed in SEEDS:
        batch = random_batch(seed, SPREADS[spread])
        ref = reference_logprobs(batch)
        found = ours(batch, {"method": "clip"}, "seq-mean-token-mean", None, ref=ref, **terms).outputs
        dropped.append((found.gradient_weights == 0).any())
        reference = trl_reference(args, batch, ref_per_token_logps=ref)
        compare(f"TRL off-policy mask, unbiased {kl}, {spread}", found, batch, reference)
    assert spread == "near" or any(dropped)


@pytest.mark.parametrize("share", [0.2, 0.75])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_trl_top_entropy(beta, share, tmp_path):
    """The same tokens have the same loss, the others only the penalty to the reference model."""
    trl = pytest.importorskip("trl")
    translated = Translation("trl", {"num_processes": 1, "top_entropy_quantile": share}).layer()
    assert translated["objective"]["top_entropy"] == share
    settings = {"top_entropy_quantile": share, "loss_type": "dapo", "use_bias_correction_kl": False}
    args = trl_config(trl.GRPOConfig, tmp_path, beta=beta, **settings)
    for seed in SEEDS:
        batch = random_batch(seed, SPREADS["apart"])
        noise = torch.rand(batch.new.shape, generator=torch.Generator().manual_seed(seed))
        entropies = (-batch.new * noise).float().double()  # TRL rounds the quantile to float32
        ref = reference_logprobs(batch)
        terms = {"chosen": entropies[batch.mask] >= entropy_threshold(entropies[batch.mask], share)}
        terms |= {"ref": ref, "reference_kl": beta}
        found = ours(batch, {"method": "clip"}, "token-mean", **terms).outputs
        assert (found.gradient_weights == 0).any()
        reference = trl_reference(args, batch, entropies, ref_per_token_logps=ref)
        compare(f"TRL top entropy {share}, β {beta}", found, batch, reference)
