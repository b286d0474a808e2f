"""Configuration of a run, one class per section. The defaults train the bundled model on countdown."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from bandpo_cli.config.batch_and_sampling import (
    CheckpointConfig,
    EvaluationConfig,
    GradingConfig,
    OptimConfig,
    RewardConfig,
    SamplingConfig,
)
from bandpo_cli.config.task import CountdownTask, TaskSettings
from bandpo_cli.errors import ConfigError, has_secret, plural
from bandpo_cli.methods.importance_correction import DEFAULT_CAP, ImportanceRules, check_importance
from bandpo_cli.methods.settings import BandSettings, MethodSettings
from bandpo_cli.metric_names import FLOPS, SAMPLED_TOKENS
from bandpo_cli.registries import ADVANTAGES, TRACKERS
from bandpo_cli.settings_validation import (
    AsList,
    CountOrAuto,
    NotEmpty,
    NotNegative,
    Positive,
    Section,
    require,
)

Dtype = Literal["float32", "bfloat16", "float16"]
EstimatorName = Annotated[str, AfterValidator(ADVANTAGES.check_name)]
TrackerName = Annotated[str, AfterValidator(TRACKERS.check_name)]


class TrackingConfig(Section):
    """The trackers, custom callbacks, the values per token that `bandpo view` shows, and reports of waits. None of them
    changes the run folder's metrics."""

    trackers: Annotated[tuple[TrackerName, ...], AsList] = ("mlflow",)
    """The trackers that receive metrics, settings and files as well: mlflow, wandb, trackio, tensorboard, or a custom
    tracker as module:Class."""
    mlflow: bool | None = None
    """false leaves MLflow out of the trackers, and true adds it. null: as `trackers`."""
    tensorboard: bool = False
    """true adds tensorboard to the trackers."""
    uri: NotEmpty | None = None
    """The MLflow server (an http address) or database. null: the environment variable MLFLOW_TRACKING_URI, and
    without it the SQLite file mlflow.db in the runs folder."""
    experiment: str = Field("bandpo", min_length=1, max_length=500)
    """The MLflow experiment of the run, and its project at the other trackers."""
    parent: NotEmpty | None = None
    """The MLflow parent run; a sweep sets it to its own run."""
    callbacks: Annotated[tuple[NotEmpty, ...], AsList] = ()
    """Subclasses of `bandpo_cli.callbacks.CallbackBase` that receive the events of the run, each as module:Class."""
    tokens_every: NonNegativeInt = 20
    """Steps between records of the values per token (token_values/), which `bandpo view` shows, the first and the last
    step always included; 0 records none. A recorded step takes 8 to 20 bytes per sampled token."""
    stall_after: NotNegative = 600.0
    """Seconds after which a process, thread, tracker or lock that has not answered, or a phase of a step without
    progress, is reported with what to do; 0 for never. A rank that does not answer for six times as long, and at least
    an hour, ends the run."""

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers in use, each once."""
        names = ["mlflow"] * bool(self.mlflow) + [*self.trackers] + ["tensorboard"] * self.tensorboard
        return tuple(name for name in dict.fromkeys(names) if name != "mlflow" or self.mlflow is not False)

    @property
    def with_mlflow(self) -> bool:
        """Whether MLflow is one of the trackers."""
        return "mlflow" in self.names

    @field_validator("uri")
    @classmethod
    def _check_no_password(cls, uri: str | None) -> str | None:
        """Refuse a password and a token: the config.yaml of a run is copied, shared and uploaded."""
        require(
            uri is None or not has_secret(uri),
            "it may contain a password, which the run folder would store; set MLFLOW_TRACKING_URI instead",
        )
        return uri


EMBEDDED_MODEL = "embedded"


class LoraSettings(Section):
    """Low-rank adapters on linear layers, which are trained in place of the model's own weights (LoRA)."""

    rank: PositiveInt
    """Rank of the product B·A that an adapter adds to the weights of its layer."""
    alpha: Positive | None = None
    """The product is multiplied by alpha / rank; null for twice the rank."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names of the linear layers that get an adapter, such as q_proj; null for all but the output layer."""

    @property
    def scaling(self) -> float:
        """Factor of the product B·A."""
        return 2.0 if self.alpha is None else self.alpha / self.rank

    def describe(self) -> str:
        """Return rank, alpha and target layers in one line."""
        targets = ", ".join(self.target_modules or ["all linear layers but the output layer"])
        return f"of rank {self.rank}, alpha {self.scaling * self.rank:g}, on {targets}"


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = EMBEDDED_MODEL
    """A Hugging Face folder or hub id; `embedded` is the small model that ships with the package, and
    `embedded-calculator`, the default of the task `calculator`, the one that calls a tool."""
    revision: NotEmpty | None = None
    """The revision (branch, tag or commit) of a model on the hub; null for the latest."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of forward and backward passes; `auto` is bfloat16 on a CUDA GPU and float32 elsewhere, and a run
    writes the one that it used into its config.yaml. In 16 bits the optimizer keeps float32 master weights, and with
    float16 the loss is scaled, and an update whose gradient overflows is skipped."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "varlen"] = "auto"
    """Attention kernels; `auto` is PyTorch's own (sdpa). `varlen` is sdpa for sampling, and for training the
    FlashAttention kernels in torch, which need no padding; it needs a GPU and bfloat16."""
    head: CountOrAuto = "auto"
    """The size of a tile of logits in MiB: log-probs of the output layer are computed tile by tile. `auto` is 32 on a
    CPU and 256 on a GPU. On a GPU `make gpu-check` compares sizes."""
    compile: bool = False
    """Compile the norms and the MLP of each layer with torch.compile, which fuses their elementwise operations. The
    first passes take minutes longer. `python benchmarks/plain_passes.py --compile` measures what a machine gains."""
    gradient_checkpointing: Literal[True, False, "auto"] = False
    """Recompute activations in the backward pass: less memory, about a third more time. `auto`, the default of tasks
    for language models, is false where an update fits without it by the estimate of the memory."""
    prompts: Literal["auto", "chat", "raw"] = "auto"
    """How chat messages become text: by the tokenizer's chat template, or joined unchanged; `auto` uses the
    template where there is one. Tasks with plain-text prompts (countdown) are not affected."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Arguments of the tokenizer's chat template, such as {enable_thinking: false} for Qwen3; null for none."""
    trust_remote_code: bool = False
    """Run the Python files in the model's folder or hub repository, with all your permissions on this machine. Only
    architectures that transformers does not know need it; weights are read from safetensors files only in any case."""
    device: str = "auto"
    """A torch device name; `auto` is a GPU where there is one, else the CPU."""
    lora: LoraSettings | None = None
    """Train low-rank adapters and keep the model's own weights as they are; null trains all weights."""


class ObjectiveConfig(Section):
    """The objective apart from the ratio bounds, which are `bounds`."""

    advantages: EstimatorName = "group"
    """The advantage estimator: the reward less the mean of its group (`group`), the same divided by the standard
    deviation of all rewards of the step (`batch`) or by the mean of the group (`maxrl`), or the reward less the mean of
    the others of its group (`rloo`); or the sum over `task.rewards`, each of which is divided by its own deviation in
    the group, over the deviation of the step (`gdpo`); or a custom function of rewards and mask as module:function."""
    advantage_std: bool = True
    """With `group`: divide advantages by the group's standard deviation (GRPO); false only centres them (Dr. GRPO)."""
    aggregation: Literal["seq-mean-token-mean", "token-mean", "seq-sum-norm"] = "seq-mean-token-mean"
    """How token losses are averaged: within completions, then over them (GRPO); over all tokens (DAPO); or summed per
    completion and divided by `sampling.max_tokens` (Dr. GRPO)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 10.0
    """For a negative advantage a, a token's loss never exceeds −dual_clip·a; null disables this."""
    reference_kl: NotNegative = 0.0
    """Coefficient of the estimate of KL(π‖π_reference); 0 loads no reference model."""
    reference_kl_estimator: Literal["k3", "unbiased"] = "k3"
    """The estimate: k3 = u − 1 − log u with u = π_reference/π, or r·k3 (`unbiased`), whose gradient is unbiased where π
    has moved away from the π_old that sampled the tokens (DeepSeek-V3.2)."""
    drift_penalty: NotNegative = 0.0
    """Coefficient of log²r, r = π/π_old, which is added to the loss of each token with any method (prime-rl: 1e-3)."""
    off_policy_mask: Positive | None = None
    """Threshold δ in nats per token: completions with a negative advantage have no policy loss where the mean of
    log μ − log π over their tokens exceeds δ, μ being the sampler's policy (DeepSeek-V3.2; TRL advises 0.5). null: no
    mask."""
    top_entropy: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The share of an update's tokens that have a policy loss: those with the highest entropy under π_old (0.2 trains a
    fifth of the tokens). An engine that reports no entropies (vLLM) costs a forward pass more. null: all tokens."""
    entropy_bonus: NotNegative = 0.0
    """Coefficient of the entropy of the policy's distribution at each token, at the sampling temperature, by which the
    loss is reduced; 0 for no bonus."""
    entropy_target: Positive | None = None
    """The `train/entropy`, in nats per token, up to which there is an entropy bonus. Its coefficient starts at 0, rises
    by `entropy_bonus_step` after each step with an entropy up to the target, and falls by it after the other steps,
    which no bonus follows (Skywork-OR1). null: the constant `entropy_bonus`."""
    entropy_bonus_step: Positive = 1e-4
    """With `entropy_target`: the change of the coefficient per step."""
    entropy_bonus_max: Positive = 0.005
    """With `entropy_target`: the largest coefficient."""
    mask_truncated: bool = False
    """Leave completions without an end token out of the loss and its normalisation (DAPO's over-long filtering). Their
    rewards still count in the advantages of their group."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """The source of log π_old in the ratio: recomputed by the trainer, or as reported by the sampler. With
    `sampling.max_lag` the trainer's are those of the weights that the step starts from, the sampler's of older ones."""
    importance: ImportanceRules = "token-truncate"
    """Where the sampler's log-probs are not the trainer's (another engine, or 16-bit weights) and `old_logprobs` are
    the trainer's: the weight of each token's loss. It is w = π_old/π_sampler of the token, or its geometric mean over
    the completion (`sequence-truncate`, `sequence-mask`), truncated to min(w, importance_cap), or masked: 0 outside
    [importance_floor, importance_cap]. `sequence-mask-any` masks a completion if any of its tokens is outside. Or: a
    list of rules with their own limits, in the order in which they apply; or the name of a preset of verl, such as
    decoupled_geo_rs_token_tis, which stands for such a list."""
    importance_cap: Positive | None = DEFAULT_CAP
    """The largest importance weight; null for no correction."""
    importance_floor: Positive | None = None
    """With a mask: the smallest importance weight that is not masked; null for 1/importance_cap."""
    all_token_metrics: bool = False
    """Run further forward passes where the sampler's log-probs are not the trainer's, so that `train/entropy` and the
    metrics `sampler/` are those of all tokens, and not only of those whose log-probs the loss needs."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        require(
            self.advantage_std or self.advantages == "group",
            f"advantage_std = False applies to advantages = 'group' only, not to '{self.advantages}'; leave it out",
        )
        require(
            self.reference_kl > 0 or self.reference_kl_estimator == "k3",
            f"reference_kl_estimator = {self.reference_kl_estimator!r} has no effect with reference_kl = 0; set "
            "reference_kl, such as 0.001, or leave it out",
        )
        require(
            self.old_logprobs == "trainer"
            or (self.importance == "token-truncate" and self.importance_cap in (None, DEFAULT_CAP)),
            "importance and importance_cap have no effect with old_logprobs = 'sampler', whose ratio needs no "
            "correction; leave them out",
        )
        require(
            self.entropy_target is None or not self.entropy_bonus,
            f"entropy_bonus = {self.entropy_bonus:g} is a constant coefficient, which entropy_target = "
            f"{self.entropy_target} replaces; leave one of them out",
        )
        for name in ("entropy_bonus_step", "entropy_bonus_max"):
            require(
                self.entropy_target is not None
                or getattr(self, name) == type(self).model_fields[name].default,
                f"{name} = {getattr(self, name):g} has no effect without entropy_target; set it, such as 0.2",
            )
        if self.model_fields_set & {"importance", "importance_cap", "importance_floor"}:
            check_importance(self.importance, self.importance_floor, self.importance_cap)
        return self


class StopConfig(Section):
    """Criteria that end a run early, with a checkpoint: a metric is beyond a limit in consecutive steps."""

    entropy_below: Positive | None = None
    """The lowest `train/entropy`, in nats per token; null for no limit."""
    gap_above: Positive | None = None
    """The highest `sampler/logprob_gap_mean`, the mean absolute difference between the log-probs of the sampler and of
    the trainer, in nats per token; null for no limit."""
    truncation_above: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The highest `train/truncated_fraction`, the share of completions truncated at `sampling.max_tokens`; null for no
    limit."""
    steps: PositiveInt = 20
    """Number of consecutive steps beyond a limit after which the run ends. A warning comes at half of it."""
    tokens: PositiveInt | None = None
    """Budget of sampled tokens (`compute/sampled_tokens`): the step that reaches it is the last one, with an evaluation
    and a checkpoint; null for no budget."""
    flops: Positive | None = None
    """The same for model FLOPs of sampling and training (`compute/flops`)."""

    def budget_reached(self, record: Mapping[str, Any]) -> str | None:
        """Return the budget that a run has reached with a line of metrics.jsonl, and what it has taken; else None."""
        for name, limit, metric in (("tokens", self.tokens, SAMPLED_TOKENS), ("flops", self.flops, FLOPS)):
            if limit is not None and (taken := record[metric]) >= limit:
                return f"stop.{name} = {limit:g}: the run has taken {taken:.6g} ({metric})"
        return None


WITHOUT_EFFECT = (
    "tracking",
    "checkpoint",
    "stop",
    "grading.workers",
    "grading.concurrency",
    "model.gradient_checkpointing",
    "sampling.vllm.memory_fraction",
)
"""Sections and settings that change no number of a run but its times and its last step, and vLLM's share of a GPU,
which by default follows from the GPU.

Settings that change the order of additions (`optim.micro_batch_tokens`) or the batches of an engine
(`sampling.max_sequences`, `sampling.vllm`) are not among them: a sampled token can depend on the last bit of a
log-prob.
"""


class RunConfig(Section):
    """All settings that determine what a run computes. The same configuration gives the same run."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of every random choice."""
    deterministic: bool = False
    """Use kernels that give the same bits in every run on the same GPU, software and number of ranks, at the cost of
    speed; refused where a kernel has no such form. On a CPU it changes nothing."""
    steps: PositiveInt = 100
    """Batches of rollouts."""
    model: ModelConfig = ModelConfig()
    task: SerializeAsAny[TaskSettings] = CountdownTask()
    """The problems, the text of the prompts, and the graders of the answers."""
    sampling: SamplingConfig = SamplingConfig()
    grading: GradingConfig = GradingConfig()
    reward: RewardConfig = RewardConfig()
    bounds: SerializeAsAny[MethodSettings] = BandSettings()
    """The method, that is the policy loss. Most methods bound the ratio; some methods under this key have no bounds."""
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _check_sections_agree(self) -> Self:
        prompts, updates = self.sampling.prompts, self.optim.updates
        require(
            not self.model.chat_template_kwargs
            or (self.model.prompts != "raw" and not isinstance(self.task, CountdownTask)),
            f"model.chat_template_kwargs = {self.model.chat_template_kwargs}: the prompts are plain text, which no "
            "chat template formats; leave it out",
        )
        require(
            prompts % updates == 0,
            f"sampling.prompts = {prompts} cannot be split evenly into optim.updates = {updates}; "
            f"take prompts = {max(1, prompts // updates) * updates} or another number of updates",
        )
        lag, objective, method = self.sampling.max_lag, self.objective, self.bounds
        require(
            method.has_negative or objective.off_policy_mask is None,
            f"objective.off_policy_mask has no effect with bounds.method = '{method.method}', which trains on positive "
            "advantages only; leave it out",
        )
        require(
            not method.needs_sampler or objective.old_logprobs == "trainer",
            f"bounds.method = '{method.method}' compares the trainer's log-probs with the sampler's, and has no effect "
            "with objective.old_logprobs = 'sampler'; set it to 'trainer'",
        )
        require(
            not lag or objective.old_logprobs == "sampler" or objective.importance_cap is not None,
            f"sampling.max_lag = {lag}: completions are samples of older weights, which the importance correction "
            "accounts for; set objective.importance_cap, such as 2.0, or objective.old_logprobs to 'sampler'",
        )
        buffer, most, reward = self.reward.overlong_buffer, self.sampling.max_tokens, self.reward
        parts = [part for part in self.task.rewards or () if part.weight]
        least = reward.wrong - (reward.overlong_penalty if buffer else 0.0)
        least += (reward.correct - reward.wrong) * sum(min(part.weight, 0.0) for part in parts)
        require(
            objective.advantages != "maxrl" or least >= 0,
            f"objective.advantages = 'maxrl' divides by the mean reward of a group; rewards may be {least:g} here "
            "(reward.wrong, less the over-long penalty and negative weights) and must not be negative",
        )
        require(
            objective.advantages != "gdpo" or len(parts) > 1,
            "objective.advantages = 'gdpo' normalises several rewards separately; name two or more in task.rewards "
            "with a weight other than 0, or take 'group'",
        )
        require(
            objective.advantages != "gdpo" or not (buffer or self.sampling.dynamic),
            "objective.advantages = 'gdpo' has no sum of rewards, which reward.overlong_buffer and sampling.dynamic "
            "need; leave them out, and name a reward function of the length in task.rewards instead of a buffer",
        )
        require(
            buffer <= most, f"reward.overlong_buffer = {buffer} must be within sampling.max_tokens = {most}"
        )
        return self


def dtype_on(dtype: Literal["auto"] | Dtype, on_gpu: bool) -> Dtype:
    """Return what `model.dtype` is: for `auto` bfloat16 on a CUDA GPU and float32 elsewhere."""
    if dtype == "auto":
        return "bfloat16" if on_gpu else "float32"
    return dtype


def with_dtype(config: RunConfig, on_gpu: bool) -> RunConfig:
    """Return the settings with the dtype that `model.dtype` is on the device of the policy."""
    model = config.model.model_copy(update={"dtype": dtype_on(config.model.dtype, on_gpu)})
    return config.model_copy(update={"model": model})


def check_ranks(config: RunConfig, count: int, training: bool = True) -> None:
    """Raise ConfigError where a run or an evaluation cannot be divided among `count` processes.

    `model.device` must not be one GPU, an engine not be spread over several, and a step must have enough prompts.
    """
    device, prompts = config.model.device, config.sampling.prompts
    if count > 1 and ":" in device:
        raise ConfigError(f"model.device = '{device}': one GPU for {count} ranks; use CUDA_VISIBLE_DEVICES")
    if count > 1 and (gpus := config.sampling.vllm.tensor_parallel) > 1:
        raise ConfigError(
            f"sampling.vllm.tensor_parallel = {gpus}: each of {count} ranks has an engine on its own GPU; set it to 1, "
            "or start one rank"
        )
    if training and prompts < count:
        most = plural(prompts, "rank")
        raise ConfigError(f"sampling.prompts = {prompts}: too few for {count} ranks; start at most {most}")
