"""Methods: settings class and ratio bounds of each policy loss."""

from __future__ import annotations

from dataclasses import dataclass

from bandpo_cli.registries.base import Entry, Registry


@dataclass(frozen=True)
class MethodEntry(Entry):
    """A method (`bounds.method`).

    Attributes:
        settings: a subclass of `config.methods.MethodSettings`; the default of its field `method` is the entry's name.
        bounds: a function from these settings to a `bounds.methods.BoundsFunction`; None for a method that is not an
            interval of ratios.
        loss: a subclass of `objective.loss.PolicyLoss`.
        trust_region: the method has a divergence and a radius, so it is compared by them and not by its name.
        bounded: the upper bound is finite, so that a Band can match it.
        aliases: other names that `--method` and `bounds.method` accept.
    """

    settings: str
    bounds: str | None = None
    loss: str = "bandpo_cli.objective.interval:IntervalLoss"
    trust_region: bool = False
    bounded: bool = True
    aliases: tuple[str, ...] = ()


# fmt: off
METHODS = Registry("method", [
    MethodEntry("band", "the Band of an f-divergence trust region (arXiv 2603.04918)",
                settings="bandpo_cli.config.methods:BandSettings", bounds="bandpo_cli.bounds.methods:band",
                trust_region=True),
    MethodEntry("clip", "one fixed interval for every token (PPO, GRPO)",
                settings="bandpo_cli.config.methods:ClipSettings", bounds="bandpo_cli.bounds.methods:clip",
                aliases=("grpo", "ppo")),
    MethodEntry("clip-higher", "the fixed interval with a higher upper end (DAPO)",
                settings="bandpo_cli.config.methods:ClipHigherSettings", bounds="bandpo_cli.bounds.methods:clip"),
    MethodEntry("dcpo", "bounds that widen as the token gets rarer (arXiv 2509.02333)",
                settings="bandpo_cli.config.methods:DcpoSettings", bounds="bandpo_cli.bounds.methods:dcpo"),
    MethodEntry("none", "no clipping",
                settings="bandpo_cli.config.methods:NoClipSettings", bounds="bandpo_cli.bounds.methods:no_clip",
                bounded=False),
    MethodEntry("dppo", "a mask outside a binary trust region (arXiv 2602.04879)",
                settings="bandpo_cli.config.policy_losses:DppoSettings",
                loss="bandpo_cli.objective.token_losses:DppoLoss", bounded=False, trust_region=True),
    MethodEntry("cispo", "truncated importance weights (arXiv 2506.13585)",
                settings="bandpo_cli.config.policy_losses:CispoSettings",
                loss="bandpo_cli.objective.token_losses:CispoLoss", bounded=False),
    MethodEntry("sapo", "a soft gate on the ratio (arXiv 2511.20347)",
                settings="bandpo_cli.config.policy_losses:SapoSettings",
                loss="bandpo_cli.objective.token_losses:SapoLoss", bounded=False),
    MethodEntry("gspo", "the clipped ratio of a completion (arXiv 2507.18071)",
                settings="bandpo_cli.config.policy_losses:GspoSettings",
                loss="bandpo_cli.objective.sequence_losses:GspoLoss", bounded=False),
    MethodEntry("gmpo", "the geometric mean of clipped ratios (arXiv 2507.20673)",
                settings="bandpo_cli.config.policy_losses:GmpoSettings",
                loss="bandpo_cli.objective.sequence_losses:GmpoLoss", bounded=False),
    MethodEntry("ce-gppo", "a scaled gradient for clipped tokens (arXiv 2509.20712)",
                settings="bandpo_cli.config.policy_losses:CeGppoSettings",
                loss="bandpo_cli.objective.token_losses:CeGppoLoss", bounded=False),
    MethodEntry("aspo", "inverse ratios for positive advantages (arXiv 2510.06062)",
                settings="bandpo_cli.config.policy_losses:AspoSettings",
                loss="bandpo_cli.objective.token_losses:AspoLoss", bounded=False),
    MethodEntry("drpo", "a quadratic penalty in place of a mask (arXiv 2606.09821)",
                settings="bandpo_cli.config.policy_losses:DrpoSettings",
                loss="bandpo_cli.objective.token_losses:DrpoLoss", bounded=False),
    MethodEntry("topr", "truncated importance of negative completions (arXiv 2503.14286)",
                settings="bandpo_cli.config.policy_losses:ToprSettings",
                loss="bandpo_cli.objective.sequence_losses:ToprLoss", bounded=False),
    MethodEntry("clip-cov", "clip, and no gradient for some tokens of high covariance (arXiv 2505.22617)",
                settings="bandpo_cli.config.policy_losses:ClipCovSettings",
                loss="bandpo_cli.objective.covariance_losses:ClipCovLoss", bounded=False),
    MethodEntry("kl-cov", "a penalty on tokens of high covariance (arXiv 2505.22617)",
                settings="bandpo_cli.config.policy_losses:KlCovSettings",
                loss="bandpo_cli.objective.covariance_losses:KlCovLoss", bounded=False),
])
# fmt: on


def method_name(name: str) -> str:
    """Return the name of the method that an alias stands for, and any other name unchanged."""
    return next((entry.name for entry in METHODS.values() if name in entry.aliases), name)
