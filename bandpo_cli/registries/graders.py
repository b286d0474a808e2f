"""Graders, and the signatures of custom reward functions."""

from __future__ import annotations

from dataclasses import dataclass

from bandpo_cli.registries.registry import Entry, Registry, is_function_path


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


# fmt: off
SIGNATURES = Registry("signature", [
    SignatureEntry("verl", "compute_score(data_source, solution_str, ground_truth, extra_info), or its batch form",
                   parameters=(frozenset({"solution_str", "ground_truth"}),
                               frozenset({"solution_strs", "ground_truths"})),
                   adapter="bandpo_cli.grading.signatures:adapt_verl"),
    SignatureEntry("trl", "reward(prompts, completions, **columns)",
                   parameters=(frozenset({"completions"}),), adapter="bandpo_cli.grading.signatures:adapt_trl"),
])
# fmt: on


def split_signature(name: str) -> tuple[str | None, str]:
    """Return the signature and the function path of a custom grader; None for a signature that is not named."""
    prefix, _, rest = name.partition(":")
    return (prefix, rest) if prefix in SIGNATURES and is_function_path(rest) else (None, name)


def is_custom_grader(name: str) -> bool:
    """Return whether `name` has the form `module:function` or `SIGNATURE:module:function`."""
    return is_function_path(split_signature(name)[1])


# fmt: off
GRADERS = Registry("grader", [
    GraderEntry("math", "equality of mathematical expressions",
                first_stage="bandpo_cli.grading.answers:grade_math", worker="bandpo_cli.grading.symbolic:is_equal"),
    GraderEntry("number", "equality of plain numbers",
                first_stage="bandpo_cli.grading.answers:grade_number",
                vote="bandpo_cli.grading.answers:vote_number"),
    GraderEntry("countdown", "value of an arithmetic expression that uses each given number once",
                first_stage="bandpo_cli.grading.countdown:grade_countdown",
                vote="bandpo_cli.grading.answers:vote_countdown"),
    GraderEntry("math-dapo", "verl's and the paper's: text of the last line `Answer: ...`, normalised",
                first_stage="bandpo_cli.grading.verl_graders:grade_math_dapo",
                vote="bandpo_cli.grading.verl_graders:vote_math_dapo", templates=("answer-line",)),
    GraderEntry("math-dapo-boxed", "verl's from 0.9.1 on: `math-dapo`, else the last box",
                first_stage="bandpo_cli.grading.verl_graders:grade_math_dapo_boxed",
                vote="bandpo_cli.grading.verl_graders:vote_math_dapo_boxed", templates=("answer-line", "boxed")),
    GraderEntry("gsm8k", "verl's: number after the last `#### `",
                first_stage="bandpo_cli.grading.verl_graders:grade_gsm8k",
                vote="bandpo_cli.grading.verl_graders:vote_gsm8k", templates=("hashes",)),
    GraderEntry("gsm8k-flexible", "verl's: last number of the text",
                first_stage="bandpo_cli.grading.verl_graders:grade_gsm8k_flexible",
                vote="bandpo_cli.grading.verl_graders:vote_gsm8k_flexible"),
    GraderEntry("reasoning-gym", "the scores of the library reasoning-gym for answers in <answer> tags",
                first_stage="bandpo_cli.grading.answers:grade_tagged",
                worker="bandpo_cli.grading.reasoning_gym:score", vote="bandpo_cli.grading.answers:vote_tagged"),
], custom=f"a custom function as module:function ({', '.join(f'{name}:module:function' for name in SIGNATURES)})",
   is_custom=is_custom_grader)
# fmt: on
