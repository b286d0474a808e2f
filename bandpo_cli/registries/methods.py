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
    *[
        MethodEntry(name, summary, settings=f"bandpo_cli.config.policy_losses:{settings}Settings",
                    loss=f"bandpo_cli.objective.{module}:{settings}Loss", bounded=False, **options)
        for name, summary, settings, module, options in [
            ("dppo", "a mask outside a binary trust region (arXiv 2602.04879)", "Dppo", "token_losses",
             {"trust_region": True}),
            ("cispo", "truncated importance weights (arXiv 2506.13585)", "Cispo", "token_losses", {}),
            ("sapo", "a soft gate on the ratio (arXiv 2511.20347)", "Sapo", "token_losses", {}),
            ("gspo", "the clipped ratio of a completion (arXiv 2507.18071)", "Gspo", "sequence_losses", {}),
            ("gmpo", "the geometric mean of clipped ratios (arXiv 2507.20673)", "Gmpo", "sequence_losses", {}),
            ("ce-gppo", "a scaled gradient for clipped tokens (arXiv 2509.20712)", "CeGppo", "token_losses", {}),
            ("aspo", "inverse ratios for positive advantages (arXiv 2510.06062)", "Aspo", "token_losses", {}),
            ("drpo", "a quadratic penalty in place of a mask (arXiv 2606.09821)", "Drpo", "token_losses", {}),
            ("topr", "truncated importance of negative completions (arXiv 2503.14286)", "Topr", "sequence_losses", {}),
            ("clip-cov", "clip, without some tokens of high covariance (arXiv 2505.22617)", "ClipCov",
             "covariance_losses", {}),
            ("kl-cov", "a penalty on tokens of high covariance (arXiv 2505.22617)", "KlCov",
             "covariance_losses", {}),
        ]
    ],
])
# fmt: on


def method_name(name: str) -> str:
    """Return the name of the method that an alias stands for, and any other name unchanged."""
    return next((entry.name for entry in METHODS.values() if name in entry.aliases), name)
