"""The whole configuration of a run. Its defaults are the embedded default: countdown on the shipped model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from bandpo_cli.config.base import Section
from bandpo_cli.config.bounds import BandBounds, BoundsConfig
from bandpo_cli.config.task import CountdownTask, TaskConfig
from bandpo_cli.config.tracking import TrackingConfig

EMBEDDED_MODEL = "embedded"
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = EMBEDDED_MODEL
    """A Hugging Face folder or hub id; `embedded` is the small model that ships with the package."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    """`auto` takes a GPU when there is one; otherwise any torch device name."""


class SamplingConfig(Section):
    """How the batch of rollouts of one step is drawn."""

    engine: Literal["auto", "transformers"] = "auto"
    prompts: PositiveInt = 64
    """Prompts a step (P)."""
    samples: Annotated[int, Field(ge=2)] = 16
    """Completions a prompt (G): the group that advantages are relative to."""
    temperature: Positive = 1.0
    max_tokens: PositiveInt = 8
    """Most tokens in a completion, its end-of-sequence token included."""
    max_sequences: PositiveInt = 2048
    """Most completions that are decoded side by side; more are drawn in turn."""


class ObjectiveConfig(Section):
    """What is maximised, the ratio bounds apart (those are `bounds`)."""

    advantage_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); false leaves them centred only (Dr. GRPO)."""
    aggregation: Literal["seq-mean-token-mean", "token-mean", "seq-sum-norm"] = "seq-mean-token-mean"
    dual_clip: Annotated[float, Field(gt=1)] | None = 10.0
    """For a negative advantage a, a token's loss never exceeds −dual_clip·a; null switches this off."""
    reference_kl: NotNegative = 0.0
    """Coefficient of the k3 estimate of KL(π‖π_reference); 0 loads no reference model."""


class OptimConfig(Section):
    """AdamW and the way a batch becomes updates."""

    lr: Positive = 5e-5
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
    """Most tokens in one forward pass; an update's gradient is accumulated over as many passes as it takes."""


class EvaluationConfig(Section):
    """Evaluation on held-out problems while training."""

    every: Annotated[int, Field(ge=0)] = 20
    """Steps between evaluations, the start and the end always included; 0 switches evaluation off."""
    problems: PositiveInt = 128
    samples: PositiveInt = 16
    """Completions a problem (n)."""
    k: tuple[PositiveInt, ...] = (4, 16)
    """The k of pass@k; pass@1 is mean@n itself."""
    temperature: Positive = 1.0

    @model_validator(mode="after")
    def _k_within_samples(self) -> EvaluationConfig:
        if any(k > self.samples for k in self.k):
            raise ValueError(
                f"k = {max(self.k)} needs at least as many samples; evaluation.samples is {self.samples}"
            )
        return self


class CheckpointConfig(Section):
    """When the policy's weights are written to checkpoints/; the last step always is."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0 writes the last one only."""


class RunConfig(Section):
    """Everything that decides what a run computes. Running the same one again gives the same run."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    steps: PositiveInt = 100
    model: ModelConfig = ModelConfig()
    task: TaskConfig = CountdownTask()
    sampling: SamplingConfig = SamplingConfig()
    bounds: BoundsConfig = BandBounds()
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
