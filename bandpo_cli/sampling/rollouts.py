"""Rollouts: the setup of sampling, completions of one turn or of a conversation, and graded groups."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from bandpo_cli.config.batch_and_sampling import RewardConfig, resolve_engine
from bandpo_cli.config.run import RunConfig, dtype_on
from bandpo_cli.errors import UserError
from bandpo_cli.models.load import Policy, load_policy, load_tokenizer, read_config
from bandpo_cli.models.model_files import base_config
from bandpo_cli.objective.advantages import shaped_rewards
from bandpo_cli.processes.ranks import SINGLE, Ranks, is_gpu
from bandpo_cli.registries import ENGINES
from bandpo_cli.sampling import prompt_encoding
from bandpo_cli.sampling.conversations import Conversations, Session, build_conversations
from bandpo_cli.sampling.prompt_encoding import EncodedPrompt, PromptEncoder, completion_stop_ids
from bandpo_cli.sampling.sampler import Sampler, SampleRequest, SamplingParams, StaleEngineError
from bandpo_cli.tasks.task import Task
from bandpo_cli.types import (
    COIN,
    ENVIRONMENT_REWARD,
    MESSAGES,
    Completion,
    Grade,
    Group,
    Problem,
    Rollout,
    derive_seed,
)


@dataclass
class Prompts:
    """The problems of a run or an evaluation whose prompts fit."""

    encoder: PromptEncoder
    train: Sequence[Problem]  # empty for an evaluation
    heldout: Mapping[str, Sequence[Problem]]  # of each evaluation set, by label
    conversations: Conversations | None  # samples the turns of a task with tools or an environment
    notes: list[str]  # messages about the data for the user, one line each
    model_config: PreTrainedConfig  # config.json of the model, of an adapter that of its base


@dataclass
class SamplingSetup(Prompts):
    """What sampling needs besides the engine: the prompts, the policy and the tokens that end a completion."""

    policy: Policy
    stop_ids: tuple[int, ...]


def set_up_sampling(config: RunConfig, task: Task, ranks: Ranks, training: bool = True) -> SamplingSetup:
    """Encode and check the prompts and load the policy; the ranks must call this together.

    An evaluation (not `training`) has no training problems and no gradients. Raise UserError if the model or the data
    cannot be loaded, or a prompt limit leaves no problem.
    """
    prompts = encode_prompts(config, task, ranks, training)
    files = prompts.model_config, prompts.encoder.tokenizer
    policy = load_policy(config.model, training, ranks, config.seed, *files)
    problems = [*prompts.train, *chain.from_iterable(prompts.heldout.values())]
    stop_ids = completion_stop_ids(policy, prompts.encoder, problems)
    return SamplingSetup(**vars(prompts), policy=policy, stop_ids=stop_ids)


def encode_prompts(config: RunConfig, task: Task, ranks: Ranks = SINGLE, training: bool = True) -> Prompts:
    """Encode and check the prompts before the weights are loaded; the errors are those of `set_up_sampling`."""
    model = check_engine_settings(config)
    text = model.get_text_config()
    rows, most = (getattr(text, name, None) for name in ("vocab_size", "max_position_embeddings"))
    if most is not None and config.sampling.max_prompt_tokens + config.sampling.max_tokens > most:
        raise config.sampling.context_error(most)
    encoder = PromptEncoder.of_run(load_tokenizer(config.model), config, rows)
    conversations = build_conversations(config, encoder, ranks) if config.task.functions else None
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
    return Prompts(encoder, train, heldout, conversations, notes, model)


def check_engine_settings(config: RunConfig) -> PreTrainedConfig:
    """Return config.json of the model, which the engine of the settings runs, and samples at their temperatures.

    Raise UserError if the model is a mixture of experts, which the engine does not run, its config cannot be read, or
    the engine does not sample at a temperature, or a setting has no effect on the dtype or device of the model.
    """
    on_gpu = is_gpu(config.model.device)
    engine = resolve_engine(config.sampling.engine, on_gpu)
    for section in ("sampling", "evaluation"):
        temperature, (low, high) = getattr(config, section).temperature, ENGINES[engine].temperatures
        if temperature and not low <= temperature <= high:
            raise UserError(
                f"{section}.temperature = {temperature:g}: {engine} samples at {low:g} to {high:g}, or at 0; "
                "choose one of these, or use --sampler transformers"
            )
    if config.sampling.vllm.float32_head and dtype_on(config.model.dtype, on_gpu) == "float32":
        raise UserError(
            "sampling.vllm.float32_head = True: the model is in float32, and so are its logits; leave it out, or set "
            "model.dtype=bfloat16"
        )
    has_process = config.sampling.max_lag and config.sampling.engine_process
    if config.sampling.weight_transfer == "cuda-ipc" and not (on_gpu and has_process):
        problem = "needs a GPU and an engine process (sampling.max_lag above 0)"
        raise UserError(f"sampling.weight_transfer = 'cuda-ipc' {problem}; leave it out")
    model = read_config(base_config(config.model)[0])
    text = model.get_text_config()
    # transformers stores the experts of a layer in one tensor, under names that vLLM's loader does not know.
    experts = [value for key, value in text.to_dict().items() if key.endswith("experts")]
    if not ENGINES[engine].runs_experts and any(isinstance(count, int) and count > 1 for count in experts):
        raise UserError(
            f"model.path = {config.model.path!r}: {text.model_type} is a mixture of experts, which the {engine} engine "
            "cannot load from the trainer; use --sampler transformers"
        )
    return model


def stream_completions(
    sampler: Sampler,
    requests: Iterable[tuple[Sequence[Problem], SampleRequest]],
    params: SamplingParams,
    version: int,
    conversations: Conversations | None = None,
) -> Generator[list[list[Completion]], None, None]:
    """Yield the completions [P][n] of each request in order, sampled at the same time if the sampler can.

    Args:
        requests: each with its problems [P].
        conversations: samples several turns per completion; None for one.

    Raises:
        StaleEngineError: the engine has other weights than those after `version` optimizer updates.
        RunError: the system refuses to start a worker of the conversations.
    """
    session = None if conversations is None else Session(conversations, params, sampler)
    source: Iterable[SampleRequest | None] = (request for _, request in requests)
    if session is not None:
        source = session.requests(iter(requests))
    with closing(sampler.sample_stream(source, params, in_order=session is None)) as stream:
        for number, completions_PG in stream:
            others = {item.policy_version for group in completions_PG for item in group} - {version}
            if others:
                raise StaleEngineError(
                    f"the engine sampled from the weights of update {min(others)}, the policy is at {version}"
                )
            if session is None:
                yield completions_PG
            else:
                session.add_turns(number, [completion for (completion,) in completions_PG])
                yield from session.completed()
    if session is not None:
        yield from session.completed()  # those that have ended with a reply and not with a turn


def decode_completions(
    tokenizer: PreTrainedTokenizerBase, completions_PG: Sequence[Sequence[Completion]]
) -> list[str]:
    """Return the text of each completion, [P·G], without special tokens; of a conversation, that of the last turn."""
    completions = chain.from_iterable(completions_PG)
    ids = [[*item.token_ids[item.inserted[-1].position if item.inserted else 0 :]] for item in completions]
    # transformers decodes no sequences as one empty sequence
    return [*tokenizer.batch_decode(ids, skip_special_tokens=True)] if ids else []


def problem_per_completion(
    problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]
) -> list[Problem]:
    """Return the problem of each completion, [P·G], with the turns of a conversation in `extra`, for its grader."""
    pairs = zip(problems_P, completions_PG, strict=True)
    return [with_turns(problem, completion) for problem, group in pairs for completion in group]


def with_coins(problems: Sequence[Problem], samples: int, seed: int, probability: float) -> list[Problem]:
    """Return the problems of completions, [P·n], each with the side of a coin for the grader `random`.

    The coin of a completion depends on the seed of its prompt, `seed + i` for prompt i, and its number alone.
    """
    tossed = []
    for index, problem in enumerate(problems):
        number = derive_seed(seed + index // samples, "coin", index % samples)
        tossed.append(replace(problem, extra={**problem.extra, COIN: number < probability * 2**63}))
    return tossed


def with_turns(problem: Problem, completion: Completion) -> Problem:
    """Return the problem with the messages of a conversation, and the reward of its environment, in `extra`."""
    if (turns := completion.conversation) is None:
        return problem
    reward = {} if turns.reward is None else {ENVIRONMENT_REWARD: turns.reward}
    return replace(problem, extra={**problem.extra, MESSAGES: turns.messages, **reward})


def graded_groups(
    problems_P: Sequence[Problem],
    prompts_P: Sequence[EncodedPrompt],
    completions_PG: Sequence[Sequence[Completion]],
    texts: Sequence[str],
    grades: Sequence[Grade],
    reward: RewardConfig,
    max_tokens: int,
) -> list[Group]:
    """Return one group per problem with the graded completions and their shaped rewards.

    `texts` and `grades` are those of all completions, [P·G]; `max_tokens` is the most that a completion may have.
    """
    lengths = [len(completion.token_ids) for completions in completions_PG for completion in completions]
    graded = zip(texts, grades, shaped_rewards(grades, lengths, max_tokens, reward), strict=True)
    groups = []
    for problem, prompt, completions in zip(problems_P, prompts_P, completions_PG, strict=True):
        rollouts = []
        for completion, (text, grade, shaped) in zip(completions, graded, strict=False):
            about = prompt.text, prompt.token_ids, completion, text, replace(grade, reward=shaped)
            rollouts.append(Rollout(with_turns(problem, completion), *about))
        groups.append(Group(problem, tuple(rollouts)))
    return groups
