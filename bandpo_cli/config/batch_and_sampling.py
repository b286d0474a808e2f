"""Settings of sampling, grading, rewards, evaluation, updates and checkpoints, and the engine and its GPU.

No engine is imported for the choice.
"""

import os
from importlib.util import find_spec
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from bandpo_cli.errors import ConfigError
from bandpo_cli.metric_names import is_clock_metric
from bandpo_cli.registries import AUTO_ENGINE, ENGINES, GRADERS
from bandpo_cli.settings_validation import (
    AsList,
    CountOrAuto,
    NotEmpty,
    NotNegative,
    Positive,
    Section,
    require,
    trainer_keys,
)


class VllmConfig(Section):
    """Settings of the vLLM engine."""

    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the GPU's memory for the engine's weights and cache; the trainer uses the same GPU, unless
    an engine process has a GPU of its own. null: what a full batch needs, and at most what the trainer leaves by the
    estimate; a run writes the share that it used into its config.yaml. Ignored on a CPU."""
    kv_cache_gb: Positive = 2.0
    """Size of the key-value cache on a CPU, GiB. Ignored on a GPU."""
    tensor_parallel: PositiveInt = 1
    """Number of GPUs per engine."""
    eager: bool = False
    """Run without CUDA graphs and compilation: faster to start, slower to sample."""
    sleep: Literal[True, False, "auto"] = True
    """Free the engine's GPU memory while the trainer updates. `auto`, the default of tasks for language models, is
    false where an update fits beside an engine with room for all its sequences. No effect with an engine process."""
    prefix_caching: bool = True
    """Compute each prompt once for all its completions."""
    float32_head: bool = False
    """Compute the logits in float32 with a model in 16 bits, as the trainer does (MiniMax-M1, prime-rl)."""


class SamplingConfig(Section):
    """Sampling of the batch of rollouts of one step."""

    engine: Annotated[str, AfterValidator(ENGINES.check_name)] = AUTO_ENGINE
    """`auto` is vllm where it is installed and there is a GPU, else transformers."""
    prompts: PositiveInt = 64
    """Prompts per step (P)."""
    samples: Annotated[int, Field(ge=2)] = 16
    """Completions per prompt (G): the group that advantages are relative to."""
    temperature: Positive = 1.0
    """Logits are divided by this before sampling, and in the policy that is trained."""
    max_tokens: PositiveInt = 8
    """Maximum number of tokens in a completion, its end-of-sequence token included."""
    stop: Annotated[tuple[NotEmpty, ...], AsList] = ()
    """Texts that end a completion, or the message of a conversation, with the token that completes one of them. They
    stay in the completion, which is trained on as it was sampled; prompts are not searched."""
    max_prompt_tokens: PositiveInt = 64
    """Problems with a longer prompt are dropped and counted."""
    max_sequences: PositiveInt = 2048
    """Maximum number of completions decoded in parallel; more are sampled in several batches."""
    dynamic: bool = False
    """Dynamic sampling (DAPO): groups whose rewards are all equal have no gradient, so they are dropped and replaced
    from further prompts."""
    dynamic_batches: PositiveInt = 10
    """With `dynamic`: maximum number of batches sampled for one step; the step then uses the groups it has."""
    max_lag: NonNegativeInt = 0
    """Steps by which the weights that sample a batch are older than those that its step starts from; fewer in the first
    steps, whose batches the initial weights sample. Above 0 the importance correction is on."""
    engine_process: bool = True
    """With `max_lag` above 0: run the engine in a separate process, which samples while the trainer updates. false: the
    trainer's process samples the same batches before the updates. Without a lag there is no engine process."""
    weight_transfer: Literal["host", "cuda-ipc"] = "host"
    """Path of the weights to the engine process: memory of the host, or a buffer on the trainer's GPU that both
    processes map. `cuda-ipc` needs a GPU that both can see."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Truncated sampling is refused for training: the ratio needs the full distribution."""
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _check_engine_and_distribution(self) -> Self:
        require(
            not (self.max_lag and self.engine_process) or self.vllm.tensor_parallel == 1,
            "the engine process of a rank has one GPU: set vllm.tensor_parallel to 1, or engine_process to false",
        )
        for name, untruncated in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
            value = getattr(self, name)
            require(
                value == untruncated,
                f"{name} = {value}: truncated sampling is refused for training: the ratio π/π_old needs π_old to be "
                f"the full distribution that the loss differentiates; leave it at {untruncated}",
            )
        return self

    def context_error(self, most: int) -> ConfigError:
        """Return the error for a model that reads at most this number of tokens, fewer than a prompt and its answer."""
        prompt, completion = self.max_prompt_tokens, self.max_tokens
        name, rest = ("max_prompt_tokens", completion) if prompt > completion else ("max_tokens", prompt)
        return ConfigError(
            f"sampling.max_prompt_tokens = {prompt:,} and sampling.max_tokens = {completion:,} come to "
            f"{prompt + completion:,} tokens; the model reads at most {most:,}; "
            + (
                f"lower one of them, such as --set sampling.{name}={most - rest}"
                if most > rest
                else "lower both"
            )
        )


class GradingConfig(Section):
    """The worker processes that grade answers."""

    workers: PositiveInt | None = None
    """null: one per core, at most 8. They start when the first answer needs one."""
    deadline: Positive = 5.0
    """Time limit per answer in seconds; then its worker is killed and replaced, and the answer counts as a timeout. The
    call of an asynchronous function is cancelled instead. The limit includes its retries."""
    concurrency: PositiveInt = 64
    """Calls of an asynchronous reward function (`async def`) in flight at a time; several ranks share them."""
    retries: NonNegativeInt = 3
    """Further calls of an asynchronous reward function after an exception, each after twice the wait: about 0.5, 1, 2,
    ... seconds. No retry starts after the deadline."""
    timeout_reward: Literal["none", "wrong"] = "none"
    """The reward of an answer that timed out: none, as for a grader error, so that it has no gradient, or as for a
    wrong answer. Evaluations count it as not correct in either case."""
    memory_gb: Positive = 2.0
    """Memory limit of a worker beyond the use of its imports, GiB; an answer that needs more is a grader error."""
    batch: PositiveInt = 64
    """Completions per call of a reward function that takes lists (TRL's, verl's batch form); those of one problem are
    never split. Such a call has `deadline` seconds per completion."""
    coin: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of the reward 1 by the grader `random`, for each completion on its own."""
    while_sampling: bool = False
    """Grade completions of a step while vLLM samples the others; no effect where an engine process samples ahead, which
    grades in the background in any case. Reward functions that take lists get those of fewer problems at a time."""


def _check_grader(name: str) -> str:
    if name.endswith(("_reward", "_punishment")):  # the table is read for such names only
        rewards = trainer_keys("rewards")
        require(name not in rewards, f"a reward of TRL; take {rewards.get(name)}")
    return GRADERS.check_name(name)


GraderName = Annotated[str, AfterValidator(_check_grader)]


def check_answer_grader(name: str) -> str:
    """Return the name of a grader that can decide what is correct. Raise ValueError for a control."""
    require(
        name not in GRADERS or not GRADERS[name].is_control,
        f"'{name}' is a control, which cannot decide what is correct; --grader {name}, or "
        f"task.rewards: [{{weight: 0}}, {name}], trains on it beside the grader of the answers",
    )
    return name


def needs_answer(grader: str) -> bool:
    """Return whether a grader compares with a reference answer; custom graders and controls do without one."""
    return grader in GRADERS and GRADERS[grader].compares and not GRADERS[grader].is_control


AnswerGraderName = Annotated[GraderName, AfterValidator(check_answer_grader)]
"""A grader that decides which answers are correct."""
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=60)]
"""A part of a metric name."""


class RewardComponent(Section):
    """One of several rewards: a grader, and the weight of its reward in the sum. A plain string is the grader."""

    grader: GraderName | None = None
    """null: the grader of the task's answers; only the first of the rewards can leave it out."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of its reward in the sum: negative for a penalty, 0 to record its values without training on them."""
    name: Label | None = None
    """Its name in metrics; by default the grader or its function, and `answer` for the task's own grader."""

    @model_validator(mode="before")
    @classmethod
    def _read_plain_string(cls, value: Any) -> Any:
        return {"grader": value} if isinstance(value, str) else value

    @property
    def label(self) -> str:
        """The name of the component in metrics and in the columns of the samples."""
        return self.name or ("answer" if self.grader is None else self.grader.rpartition(":")[2])

    @property
    def is_control(self) -> bool:
        """Whether evaluations leave it out; see `GraderEntry`."""
        return self.grader is not None and self.grader in GRADERS and GRADERS[self.grader].is_control


class RewardConfig(Section):
    """The reward of a graded completion."""

    correct: FiniteFloat = 1.0
    wrong: FiniteFloat = 0.0
    """The paper's rewards are 1 and −1. A grader's partial credit is interpolated linearly between the two."""
    overlong_buffer: NonNegativeInt = 0
    """Soft over-long penalty (DAPO): over this many tokens before sampling.max_tokens the reward falls linearly by
    `overlong_penalty`; 0 for none."""
    overlong_penalty: NotNegative = 1.0
    """The reward that is subtracted from a completion of `sampling.max_tokens` tokens."""

    @model_validator(mode="after")
    def _check_correct_above_wrong(self) -> Self:
        problem = f"correct = {self.correct:g} must be more than wrong = {self.wrong:g}"
        require(self.correct > self.wrong, problem)
        return self


def default_k(n: int) -> list[int]:
    """Return the k of pass@k and maj@k for n completions per problem."""
    return [*(k for k in (4, 16, 64, 256) if k < n), n]


class EvaluationConfig(Section):
    """Evaluation on held-out problems during training."""

    every: NonNegativeInt = 20
    """Steps between evaluations, the start and the end always included; 0 disables evaluation."""
    problems: PositiveInt | None = 128
    """Maximum number of problems of each evaluation set; null for all."""
    samples: PositiveInt = 16
    """Completions per problem (n)."""
    k: tuple[PositiveInt, ...] = Field(None, validate_default=True)
    """The values of k of pass@k and maj@k; pass@1 equals mean@n. null: 4, 16, 64 and 256 below `samples`, and
    `samples`."""
    temperature: NotNegative = 1.0
    """0 is greedy decoding."""
    batch: PositiveInt = 512
    """Completions that are graded and stored together (those of one problem are never split). An interrupted evaluation
    loses those that are not stored, up to three batches and what is in vLLM's queue. The transformers engine reports
    its progress once per batch: a smaller one shows it sooner on a CPU. A problem keeps its random numbers."""

    @field_validator("k", mode="before")
    @classmethod
    def _follow_samples(cls, k: Any, info: ValidationInfo) -> Any:
        if isinstance(k, int | str):  # --set evaluation.k=1,4
            return str(k).split(",")
        return default_k(info.data.get("samples", 1)) if k is None else k

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        most, n = max(self.k, default=1), self.samples
        require(most <= n, f"k = {most} needs at least as many samples; evaluation.samples is {n}")
        require(
            self.temperature or n == 1,
            f"temperature = 0 gives the same completion each time; take samples = 1 instead of {n}",
        )
        return self

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether `step` ends with an evaluation: 0 (before training), every `every` steps, and the last."""
        return self.every > 0 and (step % self.every == 0 or step == last_step)


def is_installed(package: str | None) -> bool:
    """Return whether a package can be imported; True for None, no package. A folder of that name is no package."""
    spec = None if package is None else find_spec(package)
    return package is None or (spec is not None and spec.origin is not None)


def check_engine(engine: str, device: str, has_process: bool = False) -> None:
    """Raise ConfigError if the package of an engine is not installed, or the engine cannot use the policy's GPU
    or the system.

    vLLM in the trainer's process always runs on the first visible GPU. An engine process chooses one.
    """
    if has_process and not hasattr(os, "memfd_create"):
        raise ConfigError("the engine process needs Linux; set sampling.engine_process=false")
    kind, _, card = device.partition(":")
    name = resolve_engine(engine, on_gpu=kind == "cuda")
    if not ENGINES[name].shares_weights and card.isdecimal() and int(card) > 0 and not has_process:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        chosen = visible[int(card)] if int(card) < len(visible) else card
        raise ConfigError(
            f"model.device = '{device}': the {name} engine runs on the first visible GPU; type "
            f"CUDA_VISIBLE_DEVICES={chosen} before the command, and leave model.device out"
        )
    if engine != AUTO_ENGINE and not is_installed(package := ENGINES[engine].package):
        raise ConfigError(
            f"sampling.engine = '{engine}': the package {package} is not installed; {ENGINES[engine].install}, "
            f"or use --sampler {resolve_engine(AUTO_ENGINE, on_gpu=False)}"
        )


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW, its schedule, and the split of a batch into updates."""

    lr: Annotated[float, Field(gt=0, le=1e30)] = 5e-5
    """The peak learning rate, after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    """AdamW's decay rates of the moments (`betas`), term in the denominator (`eps`) and decoupled weight decay."""
    max_grad_norm: Positive | None = 1.0
    """The gradient's norm is clipped to this; null for no clipping."""
    warmup_steps: NonNegativeInt = 5
    """Number of updates over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 at the last step."""
    updates: PositiveInt = 4
    """Optimizer updates per batch of rollouts. With 1 the ratio is always 1 and no bound is active."""
    micro_batch_tokens: CountOrAuto = 16384
    """Maximum number of tokens in one forward pass, packed without padding; an update accumulates its gradient over as
    many passes as necessary. `auto`, the default of tasks for language models, is 16384, or where that does not fit by
    the estimate of the memory a half of it, or a half of that, and so on."""
    max_skips: NonNegativeInt = 0
    """Maximum number of consecutive updates that are skipped because a loss, gradient or log-prob is not finite; 0
    stops the run at the first. A skipped update changes no weights; the schedule continues."""

    @property
    def pass_tokens(self) -> int:
        """`micro_batch_tokens`, and its largest value where it is `auto`."""
        return 16384 if self.micro_batch_tokens == "auto" else self.micro_batch_tokens


class CheckpointConfig(Section):
    """Checkpoints: the policy and the state of training, written to checkpoints/, and how many are kept.

    The last step is always written and always kept. `keep_last` and `keep_best` add up.
    """

    every: NonNegativeInt = 10
    """Steps between checkpoints; 0 writes the last one only, and an interrupted run then starts over."""
    keep_last: PositiveInt | None = 2
    """Number of most recent checkpoints that are kept; null for all."""
    keep_best: NonNegativeInt = 1
    """Number of best checkpoints that are kept in addition; 0 for none. Only a step with both an evaluation and a
    checkpoint can be one."""
    best_metric: str | None = None
    """The metric that "best" refers to: a key of metrics.jsonl, higher is better; null for the mean over evaluation
    sets of eval/<set>/reward, which is mean@n if rewards are just 0 and 1."""
    background: bool = True
    """Write checkpoints while training continues, from a copy of weights and optimizer state in memory (on a GPU in the
    memory of the host); false makes training wait. The last step waits in either case."""

    @field_validator("best_metric")
    @classmethod
    def _check_best_metric(cls, key: str | None) -> str | None:
        require(
            key is None or ("/" in key and not is_clock_metric(key)),
            "it must be a key of metrics.jsonl that measures the policy, such as train/accuracy or "
            "eval/countdown/pass_at_4",
        )
        return key

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether a checkpoint is written after `step`: every `every` steps, and after the last one."""
        return step == last_step or (step > 0 and self.every > 0 and step % self.every == 0)

    def copies_memory(self, last_step: int) -> bool:
        """Return whether a run writes checkpoints while it trains: all but the checkpoint of the last step."""
        return self.background and 0 < self.every < last_step


def resolve_engine(engine: str, on_gpu: bool) -> str:
    """Return `engine`, and for `auto` vllm where it is installed and the policy is on a GPU, else transformers."""
    if engine != AUTO_ENGINE:
        return engine
    for name, entry in ENGINES.items():
        if on_gpu and entry.preferred_on_gpu and is_installed(entry.package):
            return name
    return next(name for name, entry in ENGINES.items() if entry.package is None)


def engine_cards(card: int, ranks: int, cards: int) -> list[int]:
    """Return the number of the GPU on which the engine process of each rank runs.

    They are GPUs that train nothing if there is one, of all `cards`, for the engine of every rank, else the GPUs of the
    ranks. A single rank may choose its `card` (`model.device`); several ranks use the first ones.
    """
    trainers = [card] if ranks == 1 else [*range(ranks)]
    free = [card for card in range(cards) if card not in trainers]
    return free[:ranks] if len(free) >= ranks else trainers


_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables of torch's GPU allocator. The first is the older one, which every version of torch and vLLM
reads."""


def use_expandable_segments(has_process: bool) -> None:
    """Make torch's GPU allocator grow its segments, unless the environment has settings for it.

    Trainer and engine release and take their memory in turn, which leaves segments that are too small for the next
    large tensor. torch reads the variable at its first allocation on a GPU. vLLM turns the setting off for the memory
    that its sleep mode releases (since 0.20.1, `use_memory_pool` in its cumem.py). An engine process does not sleep.
    """
    if not has_process and not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        os.environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
