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
])
# fmt: on


def method_name(name: str) -> str:
    """Return the name of the method that an alias stands for, and any other name unchanged."""
    return next((entry.name for entry in METHODS.values() if name in entry.aliases), name)
