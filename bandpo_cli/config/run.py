"""Settings of what a run leaves behind beside its folder (`tracking:` in a config file)."""

# MERGED: The whole configuration of a run. Its defaults are the embedded default: countdown on the shipped model.
from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from bandpo_cli.config.base import Section
from bandpo_cli.config.methods import METHOD_CHOICE, BandSettings, MethodSettings
from bandpo_cli.config.sampling import AUTO_ENGINE, check_engine_name
from bandpo_cli.config.task import TASK_CHOICE, CountdownTask, TaskSettings


class TrackingConfig(Section):
    """The MLflow mirror. The run folder is written whatever stands here."""

    mlflow: bool = True
    """Send metrics, params and files to MLflow as well."""

    uri: str | None = Field(None, min_length=1)
    """Where MLflow keeps its record: an http address or a database. null: what the environment's
    MLFLOW_TRACKING_URI says, and without one the SQLite file mlflow.db in the runs folder."""

    experiment: str = Field("bandpo", min_length=1, max_length=500)
    """The MLflow experiment that the run is filed under."""

    parent: str | None = Field(None, min_length=1)
    """The MLflow run that this one is shown under: a sweep's. Set by the sweep."""

    @field_validator("uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        """A run's config.yaml is copied, shared and uploaded, so no password belongs in it."""
        if uri is not None and re.search(r"://[^/@]*:[^/@]*@", uri):
            raise ValueError(
                "it holds a password, which the run folder would keep; set MLFLOW_TRACKING_URI instead"
            )
        return uri


EMBEDDED_MODEL = "embedded"
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = EMBEDDED_MODEL
    """A Hugging Face folder or hub id; `embedded` is the small model that ships with the package."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What forward and backward compute in. With bfloat16 the optimizer keeps float32 master weights."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernels; `auto` takes PyTorch's own (sdpa)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    prompts: Literal["auto", "chat", "raw"] = "auto"
    """How chat messages become text: by the tokenizer's chat template, or joined as they are; `auto` takes the
    template where there is one. Tasks that give plain text (countdown) are not touched."""
    trust_remote_code: bool = False
    """Run the Python files that the model's folder or hub page brings, with all that you may do on this machine. Only
    architectures that transformers does not know need it; weights are read from safetensors alone all the same."""
    device: str = "auto"
    """`auto` takes a GPU when there is one; otherwise any torch device name."""


class VllmConfig(Section):
    """Settings of the vLLM engine."""

    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the GPU's memory for the engine's weights and cache; the trainer shares the card. No use on a CPU."""
    kv_cache_gb: Positive = 2.0
    """Size of the key-value cache on a CPU, GiB. No use on a GPU."""
    tensor_parallel: PositiveInt = 1
    """GPUs that one engine is spread over."""
    eager: bool = False
    """Run without CUDA graphs and compilation: starts faster, samples slower."""
    sleep: bool = True
    """Give the GPU memory back to the trainer while it updates."""
    prefix_caching: bool = True
    """Compute a prompt once for all its completions."""


class SamplingConfig(Section):
    """How the batch of rollouts of one step is drawn."""

    engine: Annotated[str, BeforeValidator(check_engine_name)] = AUTO_ENGINE
    """`auto` takes vllm where it is installed and a GPU is there, else transformers."""
    prompts: PositiveInt = 64
    """Prompts a step (P)."""
    samples: Annotated[int, Field(ge=2)] = 16
    """Completions a prompt (G): the group that advantages are relative to."""
    temperature: Positive = 1.0
    max_tokens: PositiveInt = 8
    """Most tokens in a completion, its end-of-sequence token included."""
    max_prompt_tokens: PositiveInt = 64
    """Problems with a longer prompt are dropped, and counted."""
    max_sequences: PositiveInt = 2048
    """Most completions that are decoded side by side; more are drawn in turn."""
    dynamic: bool = False
    """Dynamic sampling (DAPO): groups whose rewards are all alike teach nothing, so they are dropped and refilled
    from further prompts."""
    dynamic_batches: PositiveInt = 10
    """With `dynamic`: most batches drawn for one step; then the step goes on with the groups there are."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _whole_distribution(self) -> SamplingConfig:
        for name, whole in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(self, name) != whole:
                raise ValueError(
                    f"{name} = {getattr(self, name)}: truncated sampling is refused for training: the ratio π/π_old "
                    f"needs π_old to be the whole distribution that the loss differentiates; leave it at {whole:g}"
                )
        return self


class GradingConfig(Section):
    """The worker processes that judge answers."""

    workers: PositiveInt | None = None
    """null: one a core, 8 at most. They start when the first answer needs one."""
    deadline: Positive = 5.0
    """Seconds that one answer may take; then its worker is killed and replaced, and the answer counts as a timeout."""
    memory_gb: Positive = 2.0
    """Memory that a worker may take beyond what its imports took, GiB; an answer that wants more is a grader error."""


class RewardConfig(Section):
    """From a verdict to the reward."""

    correct: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    wrong: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """The paper's rewards are 1 and −1. A grader's partial credit lies between the two in proportion."""
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Soft over-long penalty (DAPO): over the last this many tokens before sampling.max_tokens the reward falls
    linearly by `overlong_penalty`; 0 for none."""
    overlong_penalty: NotNegative = 1.0

    @model_validator(mode="after")
    def _right_is_better(self) -> RewardConfig:
        if self.correct <= self.wrong:
            raise ValueError(f"correct = {self.correct:g} must be more than wrong = {self.wrong:g}")
        return self


class ObjectiveConfig(Section):
    """What is maximised, the ratio bounds apart (those are `bounds`)."""

    advantage_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); false leaves them centred only (Dr. GRPO)."""
    aggregation: Literal["seq-mean-token-mean", "token-mean", "seq-sum-norm"] = "seq-mean-token-mean"
    dual_clip: Annotated[float, Field(gt=1)] | None = 10.0
    """For a negative advantage a, a token's loss never exceeds −dual_clip·a; null switches this off."""
    reference_kl: NotNegative = 0.0
    """Coefficient of the k3 estimate of KL(π‖π_reference); 0 loads no reference model."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Whose log π_old the ratio is taken to: recomputed by the trainer, or as the sampler reported them."""
    importance_cap: Positive | None = 2.0
    """Truncated importance sampling: where the sampler is another engine than the trainer and `old_logprobs` are
    the trainer's, each token's loss is weighted by min(π_old/π_sampler, this); null for no correction."""


class OptimConfig(Section):
    """AdamW and the way a batch becomes updates."""

    lr: Annotated[float, Field(gt=0, le=1e30)] = 5e-5
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    max_grad_norm: Positive | None = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Updates over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    updates: PositiveInt = 4
    """Optimizer updates a batch of rollouts. With 1 the ratio is always 1 and no bound can bind."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens in one forward pass, packed without padding; an update's gradient is accumulated over as many
    passes as it takes."""
    max_skips: Annotated[int, Field(ge=0)] = 0
    """Most updates in a row that are skipped because a loss, gradient or log-prob is not finite; 0 stops the run at
    the first. A skipped update changes no weights; the schedule goes on."""


class EvaluationConfig(Section):
    """Evaluation on held-out problems while training."""

    every: Annotated[int, Field(ge=0)] = 20
    """Steps between evaluations, the start and the end always included; 0 switches evaluation off."""
    problems: PositiveInt | None = 128
    """Most problems of each evaluation set; null for all."""
    samples: PositiveInt = 16
    """Completions a problem (n)."""
    k: tuple[PositiveInt, ...] = (4, 16)
    """The k of pass@k and maj@k; pass@1 is mean@n itself."""
    temperature: NotNegative = 1.0
    """0 takes the likeliest token every time."""
    batch: PositiveInt = 512
    """Completions drawn before they are judged and stored (a problem's are never split): what an interrupted
    evaluation can lose, and what the engine has to work on at a time. Other sizes draw other completions."""

    @model_validator(mode="after")
    def _k_within_samples(self) -> EvaluationConfig:
        if any(k > self.samples for k in self.k):
            raise ValueError(
                f"k = {max(self.k)} needs at least as many samples; evaluation.samples is {self.samples}"
            )
        return self

    @model_validator(mode="after")
    def _greedy_once(self) -> EvaluationConfig:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"temperature = 0 gives the same completion each time; take samples = 1 instead of {self.samples}"
            )
        return self


class CheckpointConfig(Section):
    """When the policy is written to checkpoints/, with what training needs to go on from there, and which stay.

    The last step is always written and always stays. `keep_last` and `keep_best` add up.
    """

    every: Annotated[int, Field(ge=0)] = 10
    """Steps between checkpoints; 0 writes the last one only, and an interrupted run then starts over."""
    keep_last: PositiveInt | None = 2
    """Most recent checkpoints that stay; null keeps all."""
    keep_best: Annotated[int, Field(ge=0)] = 1
    """Checkpoints that stay beside them for being the best of all there were; 0 for none. Only a step that has
    both an evaluation and a checkpoint can be one."""
    best_metric: str | None = None
    """What "best" goes by: a key of metrics.jsonl, higher is better; null for the mean over evaluation sets of
    eval/<set>/mean_at_<n>."""

    @field_validator("best_metric")
    @classmethod
    def _of_the_policy(cls, key: str | None) -> str | None:
        if key is not None and ("/" not in key or key.startswith("time/")):
            raise ValueError(
                "it must be a key of metrics.jsonl that tells of the policy, such as train/accuracy or "
                "eval/countdown/pass_at_4"
            )
        return key


class RunConfig(Section):
    """Everything that decides what a run computes. Running the same one again gives the same run."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    steps: PositiveInt = 100
    model: ModelConfig = ModelConfig()
    task: Annotated[TaskSettings, TASK_CHOICE] = CountdownTask()
    sampling: SamplingConfig = SamplingConfig()
    grading: GradingConfig = GradingConfig()
    reward: RewardConfig = RewardConfig()
    bounds: Annotated[MethodSettings, METHOD_CHOICE] = BandSettings()
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _batch_divides(self) -> RunConfig:
        prompts, updates = self.sampling.prompts, self.optim.updates
        if prompts % updates:
            raise ValueError(
                f"sampling.prompts = {prompts} cannot be split evenly into optim.updates = {updates}; "
                f"take prompts = {max(1, prompts // updates) * updates} or another number of updates"
            )
        return self

    @model_validator(mode="after")
    def _buffer_fits(self) -> RunConfig:
        buffer, most = self.reward.overlong_buffer, self.sampling.max_tokens
        if buffer > most:
            raise ValueError(f"reward.overlong_buffer = {buffer} must be within sampling.max_tokens = {most}")
        return self
