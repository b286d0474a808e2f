"""Methods: a table of all of them, and a module per family with the settings, bounds and loss of each method.

This module needs the standard library only, since help texts name the methods. To add a method, write its class
(`methods.settings.MethodSettings`) in the module of its family, and list it here. A program that uses the package as a
library registers its own methods before it resolves a configuration:

    METHODS.register(MethodEntry("mine", "my bounds", settings="my_module:MySettings"))
"""

from dataclasses import dataclass

from bandpo_cli.custom_code import is_function_path
from bandpo_cli.registries import Entry, Registry


@dataclass(frozen=True)
class MethodEntry(Entry):
    """A method (`bounds.method`)."""

    settings: str  # a subclass of `MethodSettings`; the default of its field `method` is the entry's name
    paper: str = ""  # the source of the method and of its default settings
    without_bounds: str = ""  # why the method has no interval of ratios, as the end of a sentence
    trust_region: bool = False  # it has a divergence and a radius, and is not compared by its name alone
    named_by_region: bool = False  # in names of variants, divergence and radius stand for it: `kl 0.05`
    bounded: bool = True  # the upper bound is finite, so that a Band can match it
    by_position: bool = False  # its interval depends on the position of the token in its completion
    differs_at_ratio_one: bool = False  # its gradient differs from the others' where every ratio is 1, too
    control: bool = False  # the plain policy gradient, without an effect of its own
    aliases: tuple[str, ...] = ()  # other names that `--method` and `bounds.method` accept
    loss: str = ""  # a subclass of `PolicyLoss`, if the class of the settings does not define the loss


# fmt: off
_INTERVALS = "bandpo_cli.methods.ratio_intervals"
_WEIGHTS, _COMPLETIONS = "bandpo_cli.methods.weights_and_gates", "bandpo_cli.methods.completion_ratios"
_RATIO_OF_COMPLETION = "it clips the ratio of a completion, not the ratio of a token"

METHODS = Registry("method", [
    MethodEntry("band", "the Band of an f-divergence trust region", "bandpo_cli.methods.settings:BandSettings",
                "arXiv 2603.04918", trust_region=True, named_by_region=True),
    MethodEntry("clip", "the same fixed interval for every token (PPO, GRPO)", f"{_INTERVALS}:ClipSettings",
                "arXiv 1707.06347", aliases=("grpo", "ppo")),
    MethodEntry("clip-higher", "the fixed interval with a higher upper end (DAPO)", f"{_INTERVALS}:ClipHigherSettings",
                "arXiv 2503.14476"),
    MethodEntry("dcpo", "bounds that widen as the token gets rarer", f"{_INTERVALS}:DcpoSettings", "arXiv 2509.02333"),
    MethodEntry("ripo", "bounds that keep p·(r − 1)² constant", f"{_INTERVALS}:RipoSettings", "arXiv 2607.10169"),
    MethodEntry("atr", "the interval with r − 1 − log r ≤ δ", f"{_INTERVALS}:AtrSettings", "arXiv 2602.05494"),
    MethodEntry("none", "no clipping", f"{_INTERVALS}:NoClipSettings", bounded=False, control=True),
    MethodEntry("dppo", "a mask outside a binary trust region", f"{_INTERVALS}:DppoSettings", "arXiv 2602.04879",
                trust_region=True, bounded=False),
    MethodEntry("cppo", "dppo's mask, with a budget for the tokens before", f"{_INTERVALS}:CppoSettings",
                "arXiv 2606.10968", "its threshold depends on the position of a token and on the tokens before"),
    MethodEntry("cispo", "truncated importance weights", f"{_WEIGHTS}:CispoSettings", "arXiv 2506.13585",
                "it truncates the weight of the gradient and keeps the gradient of every token"),
    MethodEntry("sapo", "a soft gate on the ratio", f"{_WEIGHTS}:SapoSettings", "arXiv 2511.20347",
                "its gate falls smoothly and has no edge"),
    MethodEntry("gspo", "the clipped ratio of a completion", f"{_COMPLETIONS}:GspoSettings", "arXiv 2507.18071",
                _RATIO_OF_COMPLETION),
    MethodEntry("luspo", "gspo times the length of the completion", f"{_COMPLETIONS}:LuspoSettings",
                "arXiv 2602.05261", _RATIO_OF_COMPLETION, differs_at_ratio_one=True),
    MethodEntry("gapo", "gspo, wider for correct completions of harder problems", f"{_COMPLETIONS}:GapoSettings",
                "arXiv 2609.00444", _RATIO_OF_COMPLETION),
    MethodEntry("gmpo", "the geometric mean of clipped ratios", f"{_COMPLETIONS}:GmpoSettings", "arXiv 2507.20673"),
    MethodEntry("ctpo", "the clipped product of the ratios up to a token", f"{_COMPLETIONS}:CtpoSettings",
                "arXiv 2605.07331", "it clips the product of the ratios up to a token, by the position of the token",
                bounded=False, by_position=True),
    MethodEntry("ce-gppo", "a scaled gradient for clipped tokens", f"{_WEIGHTS}:CeGppoSettings", "arXiv 2509.20712",
                "tokens outside its interval keep a scaled gradient"),
    MethodEntry("dgpo", "a decaying gradient beyond the interval", f"{_WEIGHTS}:DgpoSettings", "arXiv 2603.14389",
                "tokens outside its interval keep a decaying gradient"),
    MethodEntry("aspo", "inverse ratios for positive advantages", f"{_WEIGHTS}:AspoSettings", "arXiv 2510.06062"),
    MethodEntry("drpo", "a quadratic penalty in place of a mask", f"{_WEIGHTS}:DrpoSettings", "arXiv 2606.09821",
                "its penalty grows smoothly and has no edge"),
    MethodEntry("topr", "truncated importance of negative completions", f"{_COMPLETIONS}:ToprSettings",
                "arXiv 2503.14286", "it truncates the weight of a completion, not the ratio of a token"),
    MethodEntry("vespo", "a smooth weight of the ratio of a completion", f"{_COMPLETIONS}:VespoSettings",
                "arXiv 2602.10693", "its weight of a completion falls smoothly and has no edge"),
    MethodEntry("bapo", "an interval per update that balances positive tokens", f"{_WEIGHTS}:BapoSettings",
                "arXiv 2510.18927", "its interval depends on the ratios of the update"),
    MethodEntry("vaco", "a mask away from the sampler, by the distance of a completion", f"{_COMPLETIONS}:VacoSettings",
                "arXiv 2603.01365", "it masks by the mean over a completion of the ratios to the sampler"),
    MethodEntry("m2po", "a limit on the second moment of log ratios", f"{_WEIGHTS}:M2poSettings", "arXiv 2510.01161",
                "it masks by the second moment of the log ratios to the sampler"),
    MethodEntry("wapo", "positive advantages only, with an upper bound", f"{_WEIGHTS}:WapoSettings", "arXiv 2606.16154",
                "it trains on positive advantages only", differs_at_ratio_one=True),
    MethodEntry("clip-cov", "clip, and no gradient for some tokens of high covariance", f"{_WEIGHTS}:ClipCovSettings",
                "arXiv 2505.22617", differs_at_ratio_one=True),
    MethodEntry("kl-cov", "a penalty on tokens of high covariance", f"{_WEIGHTS}:KlCovSettings", "arXiv 2505.22617",
                "it has a penalty and clips no ratio"),
], "a custom class or function as module:name", is_function_path,
   lambda name: MethodEntry(name, "custom", "bandpo_cli.methods.settings:CustomSettings",
                            loss="bandpo_cli.objective.custom_methods:custom_loss"))

def method_name(name: str) -> str:
    """Return the name of the method that an alias stands for, and any other name unchanged."""
    return next((entry.name for entry in METHODS.values() if name in entry.aliases), name)
