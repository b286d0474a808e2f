"""The sampler's interface: tokens in, tokens out. The rest of the project knows no engine by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from bandpo_cli.errors import RunError
from bandpo_cli.types import Completion

TokenIds = Sequence[int]


@dataclass(frozen=True)
class SamplingParams:
    """What a completion is drawn with. There is no top-p or top-k: they would make π_old another distribution.

    Attributes:
        samples: completions a prompt (n).
        temperature: logits are divided by it; reported log-probs are those of the divided logits.
        max_tokens: most tokens in a completion, its end token included.
        stop_ids: a completion ends with the first of these that it draws.
    """

    samples: int
    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]


class Sampler(Protocol):
    """Draws completions from the policy's current weights.

    Within a step the order is: `sample` (once or more), `sleep`, the update, `sync`.
    """

    shares_weights: bool
    """The engine runs the trainer's own model, so that its log-probs need no correction."""

    def sample(
        self, prompts_P: Sequence[TokenIds], params: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        """Return [P][n] completions; the same weights, arguments and machine give the same ones."""
        ...

    def sleep(self) -> None:
        """Give accelerator memory back to the trainer where the engine can; the next `sync` wakes it."""
        ...

    def sync(self, model: PreTrainedModel, version: int) -> None:
        """Take over the policy's weights; `version` counts the optimizer updates behind them.

        Raises:
            StaleEngineError: the engine does not run the weights that it was given.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class StaleEngineError(RunError):
    """The engine samples from other weights than the policy's; nothing learnt from it would be true."""
