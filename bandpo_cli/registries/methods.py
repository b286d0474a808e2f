"""Methods: settings class, policy loss and ratio bounds of each."""

from __future__ import annotations

from dataclasses import dataclass

from bandpo_cli.registries.registry import Entry, Registry


@dataclass(frozen=True)
class MethodEntry(Entry):
    """A method (`bounds.method`).

    Attributes:
        settings: a subclass of `config.methods.MethodSettings`; the default of its field `method` is the entry's name.
        bounds: a function from these settings to a `bounds.intervals.BoundsFunction`: the interval of ratios beyond
            which the method removes a token's gradient, by the sign of its advantage; None for a method without one.
        loss: a subclass of `objective.loss.PolicyLoss`.
        paper: the source of the method and of its default settings; "" for none.
        without_bounds: why there are no bounds, as the end of a sentence; "" where there are.
        trust_region: the method has a divergence and a radius, so it is compared by them and not by its name alone.
        named_by_region: in names of variants, divergence and radius stand for the method: `kl 0.05`.
        bounded: the upper bound is finite, so that a Band can match it.
        differs_at_ratio_one: its gradient differs from the gradient of the other methods also in the first update of a
            batch, where every ratio is 1.
        control: the plain policy gradient, without an effect of its own.
        aliases: other names that `--method` and `bounds.method` accept.
    """

    settings: str
    bounds: str | None = None
    loss: str = "bandpo_cli.objective.policy_losses:IntervalLoss"
    paper: str = ""
    without_bounds: str = ""
    trust_region: bool = False
    named_by_region: bool = False
    bounded: bool = True
    differs_at_ratio_one: bool = False
    control: bool = False
    aliases: tuple[str, ...] = ()


# fmt: off
METHODS = Registry("method", [
    MethodEntry("band", "the Band of an f-divergence trust region", paper="arXiv 2603.04918",
                settings="bandpo_cli.config.methods:BandSettings", bounds="bandpo_cli.bounds.intervals:band",
                trust_region=True, named_by_region=True),
    MethodEntry("clip", "the same fixed interval for every token (PPO, GRPO)", paper="arXiv 1707.06347",
                settings="bandpo_cli.config.methods:ClipSettings", bounds="bandpo_cli.bounds.intervals:clip",
                aliases=("grpo", "ppo")),
    MethodEntry("clip-higher", "the fixed interval with a higher upper end (DAPO)", paper="arXiv 2503.14476",
                settings="bandpo_cli.config.methods:ClipHigherSettings", bounds="bandpo_cli.bounds.intervals:clip"),
    MethodEntry("dcpo", "bounds that widen as the token gets rarer", paper="arXiv 2509.02333",
                settings="bandpo_cli.config.methods:DcpoSettings", bounds="bandpo_cli.bounds.intervals:dcpo"),
    MethodEntry("none", "no clipping",
                settings="bandpo_cli.config.methods:NoClipSettings", bounds="bandpo_cli.bounds.intervals:no_clip",
                bounded=False, control=True),
    MethodEntry("dppo", "a mask outside a binary trust region", paper="arXiv 2602.04879",
                settings="bandpo_cli.config.policy_losses:DppoSettings", bounds="bandpo_cli.bounds.intervals:dppo",
                loss="bandpo_cli.objective.policy_losses:DppoLoss", trust_region=True, bounded=False),
    MethodEntry("cispo", "truncated importance weights", paper="arXiv 2506.13585",
                settings="bandpo_cli.config.policy_losses:CispoSettings",
                loss="bandpo_cli.objective.policy_losses:CispoLoss", bounded=False,
                without_bounds="it truncates the weight of the gradient and keeps the gradient of every token"),
    MethodEntry("sapo", "a soft gate on the ratio", paper="arXiv 2511.20347",
                settings="bandpo_cli.config.policy_losses:SapoSettings",
                loss="bandpo_cli.objective.policy_losses:SapoLoss", bounded=False,
                without_bounds="its gate falls smoothly and has no edge"),
    MethodEntry("gspo", "the clipped ratio of a completion", paper="arXiv 2507.18071",
                settings="bandpo_cli.config.policy_losses:GspoSettings",
                loss="bandpo_cli.objective.policy_losses:GspoLoss", bounded=False,
                without_bounds="it clips the ratio of a completion, not the ratio of a token"),
    MethodEntry("gmpo", "the geometric mean of clipped ratios", paper="arXiv 2507.20673",
                settings="bandpo_cli.config.policy_losses:GmpoSettings", bounds="bandpo_cli.bounds.intervals:gmpo",
                loss="bandpo_cli.objective.policy_losses:GmpoLoss"),
    MethodEntry("ce-gppo", "a scaled gradient for clipped tokens", paper="arXiv 2509.20712",
                settings="bandpo_cli.config.policy_losses:CeGppoSettings",
                loss="bandpo_cli.objective.policy_losses:CeGppoLoss", bounded=False,
                without_bounds="tokens outside its interval keep a scaled gradient"),
    MethodEntry("aspo", "inverse ratios for positive advantages", paper="arXiv 2510.06062",
                settings="bandpo_cli.config.policy_losses:AspoSettings", bounds="bandpo_cli.bounds.intervals:clip",
                loss="bandpo_cli.objective.policy_losses:AspoLoss"),
    MethodEntry("drpo", "a quadratic penalty in place of a mask", paper="arXiv 2606.09821",
                settings="bandpo_cli.config.policy_losses:DrpoSettings",
                loss="bandpo_cli.objective.policy_losses:DrpoLoss", bounded=False,
                without_bounds="its penalty grows smoothly and has no edge"),
    MethodEntry("topr", "truncated importance of negative completions", paper="arXiv 2503.14286",
                settings="bandpo_cli.config.policy_losses:ToprSettings",
                loss="bandpo_cli.objective.policy_losses:ToprLoss", bounded=False,
                without_bounds="it truncates the weight of a completion, not the ratio of a token"),
    MethodEntry("clip-cov", "clip, and no gradient for some tokens of high covariance",
                paper="arXiv 2505.22617",
                settings="bandpo_cli.config.policy_losses:ClipCovSettings", bounds="bandpo_cli.bounds.intervals:clip",
                loss="bandpo_cli.objective.policy_losses:ClipCovLoss", differs_at_ratio_one=True),
    MethodEntry("kl-cov", "a penalty on tokens of high covariance", paper="arXiv 2505.22617",
                settings="bandpo_cli.config.policy_losses:KlCovSettings",
                loss="bandpo_cli.objective.policy_losses:KlCovLoss", bounded=False,
                without_bounds="it has a penalty and clips no ratio"),
])
# fmt: on


def method_name(name: str) -> str:
    """Return the name of the method that an alias stands for, and any other name unchanged."""
    return next((entry.name for entry in METHODS.values() if name in entry.aliases), name)
