"""A small language model that writes worked solutions: tokenizer, network, training, sampling."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from bandpo_cli.models.packing import Row
from bandpo_cli.sampling.sampler import SamplingParams
from bandpo_cli.sampling.transformers_sampler import TransformersSampler
from scripts.embedded_model.train import imitate

PAD, END = "<pad>", "<end>"
LEARNING_RATE = 2e-3
PROMPT_TOKENS, SOLUTION_TOKENS = 48, 256
"""The model sees the last 48 tokens of a question, since a small model makes no use of more, and the last 256 of a
solution, which end in the answer line."""
TIMED_STEPS = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of its training batches; the default has 1.1M parameters."""

    vocabulary: int = 2048
    hidden: int = 128
    layers: int = 4
    batch: int = 16


class SolutionModel:
    """A Qwen2 network with its byte-level BPE tokenizer. It depends on the texts, the shape and the seed only."""

    def __init__(self, solved: Sequence[tuple[str, str]], shape: Shape, seed: int) -> None:
        """Train the tokenizer on (prompt, solution) texts and create a network with random weights."""
        self.tokenizer = train_tokenizer(itertools.chain.from_iterable(solved), shape.vocabulary)
        self._rows = [self._row(*each) for each in solved]
        self._shape, self._seed = shape, seed
        self.model = self._build()

    def train(self, steps: int) -> None:
        """Train on random batches of the solutions; print a line every 50 steps."""
        imitate(self.model, self._batches(), steps, LEARNING_RATE)

    def steps_within(self, minutes: float) -> int:
        """Return how many steps take this long, measured with a second network, so that training is not affected."""
        print("the time of a step is measured", flush=True)
        network = self._build()
        imitate(network, self._batches(), 1, LEARNING_RATE)  # the first step allocates memory
        start = time.perf_counter()
        imitate(network, self._batches(), TIMED_STEPS, LEARNING_RATE)
        return max(1, math.floor(minutes * 60 * TIMED_STEPS / (time.perf_counter() - start)))

    def sample(self, prompts_P: Sequence[str], temperature: float, max_tokens: int, seed: int) -> list[str]:
        """Return one completion [P] per prompt, truncated at `max_tokens`."""
        sampler = TransformersSampler(self.model, self.tokenizer.pad_token_id, max_sequences=128)
        params = SamplingParams(1, temperature, max_tokens, (self.tokenizer.eos_token_id,))
        ids_P = [self._ids(prompt)[-PROMPT_TOKENS:] for prompt in prompts_P]
        groups = sampler.sample(ids_P, params, seed)
        return [self.tokenizer.decode([*group[0].token_ids], skip_special_tokens=True) for group in groups]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def _row(self, prompt: str, solution: str) -> Row:
        ended = [*self._ids(solution)[-SOLUTION_TOKENS:], self.tokenizer.eos_token_id]
        return Row(self._ids(prompt)[-PROMPT_TOKENS:], [ended])

    def _batches(self) -> Iterator[list[Row]]:
        rng = random.Random(self._seed)
        while True:
            yield rng.choices(self._rows, k=self._shape.batch)

    def _build(self) -> Any:
        torch.manual_seed(self._seed)
        shape = self._shape
        config = Qwen2Config(
            vocab_size=len(self.tokenizer),
            hidden_size=shape.hidden,
            intermediate_size=3 * shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.hidden // 32,
            num_key_value_heads=shape.hidden // 32,
            max_position_embeddings=2 * (PROMPT_TOKENS + SOLUTION_TOKENS),
            tie_word_embeddings=True,
            dtype="float32",
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            bos_token_id=None,
        )
        return Qwen2ForCausalLM(config).eval()


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Return a byte-level BPE tokenizer of at most `vocabulary` tokens."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD)
