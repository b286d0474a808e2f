"""Setup of sampling, for a run and an evaluation alike: policy, encoder of the prompts, problems that fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.processes.ranks import Ranks
from bandpo_cli.sampling import prompt_encoding
from bandpo_cli.sampling.prompt_encoding import PromptEncoder, completion_stop_ids
from bandpo_cli.sampling.rollouts import Conversations, build_conversations
from bandpo_cli.sampling.sampler import check_model
from bandpo_cli.tasks.task import Task
from bandpo_cli.types import Problem


@dataclass(frozen=True)
class SamplingSetup:
    """What sampling needs besides the engine.

    Attributes:
        train: the training problems whose prompts fit; empty for an evaluation.
        heldout: the problems of each evaluation set whose prompts fit, by label.
        stop_ids: the tokens that end a completion.
        conversations: samples the turns of a task with tools or an environment; None for another task.
        notes: messages about the data for the user, one line each.
    """

    policy: Policy
    encoder: PromptEncoder
    train: Sequence[Problem]
    heldout: Mapping[str, Sequence[Problem]]
    stop_ids: tuple[int, ...]
    conversations: Conversations | None
    notes: list[str]


def set_up_sampling(config: RunConfig, task: Task, ranks: Ranks, training: bool = True) -> SamplingSetup:
    """Load the policy and encode and check the prompts; the ranks must call this together.

    `training` is False for an evaluation, which has no training problems and no gradients.

    Raises UserError if the model or the data cannot be loaded, or a prompt limit leaves no problem.
    """
    check_model(config)
    policy = load_policy(config.model, for_training=training, ranks=ranks, seed=config.seed)
    prompt_encoding.check_context_length(policy.model.config, config)
    encoder = PromptEncoder.of_run(policy.tokenizer, config, policy.rows)
    conversations = build_conversations(config, encoder, ranks)
    train, heldout, notes = fitting_problems(encoder, task, config, training)
    stop_ids = completion_stop_ids(policy, encoder, [*train, *chain.from_iterable(heldout.values())])
    return SamplingSetup(policy, encoder, train, heldout, stop_ids, conversations, notes)


def fitting_problems(
    encoder: PromptEncoder, task: Task, config: RunConfig, training: bool = True
) -> tuple[Sequence[Problem], Mapping[str, Sequence[Problem]], list[str]]:
    """Return the problems whose prompts fit, those to train on and those of each evaluation set, and notes on them.

    Raises UserError if none of a set fit, or training refuses all prompts.
    """
    notes: list[str] = []
    train: Sequence[Problem] = ()
    if training:
        train = prompt_encoding.drop_long_prompts(encoder, "training", task.train_problems(), config, notes)
    first = {label: problems[: config.evaluation.problems] for label, problems in task.heldout_sets().items()}
    heldout = {
        label: prompt_encoding.drop_long_prompts(encoder, label, problems, config, notes)
        for label, problems in first.items()
    }
    notes += encoder.notes(train if training else [*chain.from_iterable(heldout.values())])
    return train, heldout, notes
