"""The problems that fit: those whose prompts leave the model room to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.models.load import Policy
from bandpo_cli.sampling.prompts import PromptEncoder
from bandpo_cli.types import Problem


def check_context(policy: Policy, config: RunConfig) -> None:
    """Refuse answers longer than the model was made for: it would go on, and write nonsense.

    Raises:
        ConfigError: prompt and answer together have more tokens than the model reads.
    """
    most = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    prompt, answer = config.sampling.max_prompt_tokens, config.sampling.max_tokens
    if most is not None and prompt + answer > most:
        raise ConfigError(
            f"sampling.max_prompt_tokens = {prompt:,} and sampling.max_tokens = {answer:,} come to {prompt + answer:,} "
            f"tokens; the model reads at most {most:,}; lower one of them"
        )


def fitting_sets(
    encoder: PromptEncoder, sets: Mapping[str, Sequence[Problem]], config: RunConfig, notes: list[str]
) -> dict[str, Sequence[Problem]]:
    """Return the first `evaluation.problems` of each set, less those whose prompts are too long.

    Raises:
        ConfigError: nothing is left of a set.
    """
    return {
        label: fitting_problems(encoder, label, problems[: config.evaluation.problems], config, notes)
        for label, problems in sets.items()
    }


def fitting_problems(
    encoder: PromptEncoder, label: str, problems: Sequence[Problem], config: RunConfig, notes: list[str]
) -> Sequence[Problem]:
    """Leave out the problems whose prompts are too long, and count them in a note.

    Raises:
        ConfigError: there is no problem, or all prompts are too long.
    """
    limit = config.sampling.max_prompt_tokens
    if not problems:
        raise ConfigError(f"'{label}' has no problems")
    fitting = encoder.fitting(problems, limit)
    if not fitting:
        raise ConfigError(
            f"sampling.max_prompt_tokens = {limit}: every one of the {len(problems):,} prompts of '{label}' is "
            "longer; allow more"
        )
    if len(fitting) < len(problems):
        notes.append(
            f"{label}: {len(problems) - len(fitting):,} of {len(problems):,} problems left out, their prompts have "
            f"more than {limit:,} tokens (sampling.max_prompt_tokens)"
        )
    return fitting
