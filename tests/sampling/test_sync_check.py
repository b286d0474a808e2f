"""The check after a weight sync, with the transformers sampler on a copy of the model in the place of an engine."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.models.weights import shard
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.sampling.sampler import SamplingParams, StaleEngineError, TokenIds, TransformersSampler
from bandpo_cli.sampling.sync_check import ATTEMPTS, HALF_PRECISION_LIMIT, SyncCheck, mean_gap
from bandpo_cli.types import Completion
from tests.conftest import random_model
from tests.sequential_sampler import SequentialSampler
from tests.training.several_ranks import run_ranks

LONG = 100
"""A limit of the engine's context that allows the longest prompt of the check."""
FAR_OFF = [[20.0] * 8] * 4


def shifted(completion: Completion, shifts: Sequence[float]) -> Completion:
    """Return the completion with its first log-probs shifted."""
    padded = [*shifts, *[0.0] * (len(completion.logprobs) - len(shifts))]
    pairs = zip(completion.logprobs, padded, strict=True)
    return replace(completion, logprobs=tuple(logprob + shift for logprob, shift in pairs))


class Engine(SequentialSampler):
    """Samples from `model`, and shifts the log-probs of the first completions of its first `failing` calls."""

    def __init__(self, model: PreTrainedModel, *shifts: Sequence[float], failing: int = 9) -> None:
        self._model, self._shifts, self._failing = model, shifts, failing
        self.prompts: list[TokenIds] = []
        self.lengths: list[int] = []
        self.seeds: list[int] = []

    def sync(self, model: PreTrainedModel, version: int) -> None: ...

    def sample(
        self, prompts_P: Sequence[TokenIds], params: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        (prompt,) = prompts_P
        self.prompts.append(prompt)
        self.lengths.append(params.max_tokens)
        self.seeds.append(seed)
        completions = TransformersSampler(self._model, 0).sample([prompt], params, seed)[0]
        count = len(self._shifts) if len(self.prompts) <= self._failing else 0
        return [[*map(shifted, completions[:count], self._shifts), *completions[count:]]]


def policy_of(model: PreTrainedModel, ranks: Ranks = SINGLE) -> Policy:
    no_tokenizer: Any = None
    return Policy(model, no_tokenizer, (2,), 0, ranks=ranks)


def check(model: PreTrainedModel, engine: Engine) -> float:
    """Run the check; return the gap of the last attempt."""
    sync_check = SyncCheck(policy_of(model), LONG)
    sync_check.check(model, 5, engine)
    return sync_check.gap


def test_the_gap_is_the_mean_of_all_absolute_differences():
    """A float64 copy of the model gives the log-probs; the shifts add up to 4 over 32 tokens."""
    model, prompt = random_model(), (3, 1, 4, 1, 5)
    params = SamplingParams(samples=4, temperature=1.0, max_tokens=8, stop_ids=())
    exact, reported = copy.deepcopy(model).double(), []
    for completion in Engine(model).sample([prompt], params, 0)[0]:
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logprobs = torch.log_softmax(exact(input_ids=ids).logits[0], dim=-1)
        own = [logprobs[4 + place, token].item() for place, token in enumerate(completion.token_ids)]
        reported.append(replace(completion, logprobs=tuple(own)))
    changed = [shifted(reported[0], [1.0, -1.0]), shifted(reported[1], [-2.0]), *reported[2:]]
    assert mean_gap(model, prompt, changed) == pytest.approx(4 / 32, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_synced_engine_passes_at_the_first_attempt(dtype):
    model = random_model().to(dtype)
    engine = Engine(copy.deepcopy(model))
    assert check(model, engine) < (1e-5 if dtype == torch.float32 else HALF_PRECISION_LIMIT / 2)
    assert len(engine.prompts) == 1


def test_one_token_far_off_in_16_bits_is_no_error():
    """One token off by 2 nats is 0.06 on average: rounding at a token that the policy hardly ever samples."""
    model = random_model().bfloat16()
    engine = Engine(model, [2.0])
    assert check(model, engine) == pytest.approx(2 / 32, abs=0.03)
    assert len(engine.prompts) == 1


def test_a_probe_above_the_limit_is_repeated_once_with_other_tokens():
    model = random_model().bfloat16()
    once, always = Engine(model, *FAR_OFF, failing=1), Engine(model, *FAR_OFF)
    assert check(model, once) < HALF_PRECISION_LIMIT
    assert len(once.seeds) == len(set(once.seeds)) == ATTEMPTS == 2
    message = r"version 5 of the weights: .* by 20 nats on average, .* 0\.1"
    with pytest.raises(StaleEngineError, match=message):
        check(model, always)
    assert len(always.prompts) == ATTEMPTS


def test_log_probs_that_are_not_numbers_raise():
    model = random_model()
    with pytest.raises(StaleEngineError, match="nan nats"):
        check(model, Engine(model, [math.nan]))


def test_the_first_sync_one_in_ten_and_those_after_a_failure_are_checked_completely():
    schedule, complete = SyncCheck(None, LONG), []
    for index in range(32):
        try:
            with schedule.scheduled(always=index == 14) as is_complete:
                complete += [index] * is_complete
                if index == 27:
                    raise StaleEngineError("stale")
        except StaleEngineError:
            pass
    assert complete == [0, 10, 14, 24, 28]


@pytest.mark.parametrize(
    ("dtype", "noise", "factor"), [(torch.float32, 0.01, 1.01), (torch.bfloat16, 0.3, 3.0)]
)
def test_a_layer_that_was_not_synced_and_a_scaled_tensor_raise(dtype, noise, factor):
    """A small update in float32, a large one in bfloat16."""
    model, generator = random_model().to(dtype), torch.Generator().manual_seed(0)
    old, scaled = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        scaled.get_submodule("model.layers.1.mlp.down_proj").weight.mul_(factor)
        with pytest.raises(StaleEngineError):
            check(model, Engine(scaled))
        for name, parameter in model.named_parameters():
            random = torch.randn(parameter.shape, generator=generator)
            parameter.add_((noise * parameter.float().std().nan_to_num(0.0) * random).to(dtype))
            if "layers.1." not in name:
                old.get_parameter(name).copy_(parameter)
    with pytest.raises(StaleEngineError):
        check(model, Engine(old))


@pytest.mark.slow
def test_the_first_prompt_is_natural_for_the_policy():
    """Its tokens are as likely as samples are, unlike ids taken at random."""
    policy = load_policy(ModelConfig(dtype="bfloat16"))
    engine = Engine(policy.model)
    SyncCheck(policy, LONG).check(policy.model, 0, engine)
    (prompt,) = engine.prompts
    assert len(prompt) == 72
    unnatural = tuple((7919 * index + 3) % len(policy.tokenizer) for index in range(72))

    def mean_logprob(ids: TokenIds) -> float:
        tokens = torch.tensor([ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(policy.model(input_ids=tokens).logits[0, :-1].float(), dim=-1)
        return logprobs.gather(-1, tokens[0, 1:, None])[8:].mean().item()

    assert mean_logprob(prompt) > -1.5
    assert mean_logprob(unnatural) < -4


def test_the_prompt_is_the_start_of_the_latest_rollout_that_is_long_enough():
    model = random_model()
    sync_check, engine = SyncCheck(policy_of(model), 28), Engine(model)
    sync_check.check(model, 0, engine)
    sync_check.observe(tuple(range(15)), Completion(tuple(range(10)), (-1.0,) * 10, "length", 0))
    sync_check.check(model, 1, engine)
    sync_check.observe((1, 2, 3), Completion((4, 5), (-1.0, -1.0), "stop", 0))
    sync_check.check(model, 2, engine)
    first, *later = engine.prompts
    assert len(first) == 20
    assert later == [(*range(15), *range(5))] * 2


@pytest.mark.parametrize(("max_model_len", "prompt", "completion"), [(2, 1, 1), (5, 1, 4), (12, 4, 8)])
def test_short_contexts(max_model_len, prompt, completion):
    model = random_model()
    engine = Engine(model)
    SyncCheck(policy_of(model), max_model_len).check(model, 0, engine)
    assert (len(engine.prompts[0]), engine.lengths) == (prompt, [completion])


def checked(ranks: Ranks) -> list[tuple[int, float, str | None]]:
    """Run checks in which the first probes of rank 1 are off; return probes, gap and error of this rank."""
    model = random_model()
    shard(model, ranks, torch.device("cpu"))
    results = []
    for failing in (0, 1, 2):
        engine = Engine(random_model(), *FAR_OFF, failing=failing if ranks.rank == 1 else 0)
        sync_check, error = SyncCheck(policy_of(model, ranks), LONG), None
        try:
            sync_check.check(model, 5, engine)
        except StaleEngineError as raised:
            error = str(raised)
        results.append((len(engine.prompts), sync_check.gap, error))
    return results


@pytest.mark.slow
def test_all_ranks_repeat_the_probe_that_failed_on_one_and_stop_together(tmp_path):
    """Without a failure one probe is enough; two failures on one rank are an error on all."""
    for agreed, repeated, stale in run_ranks(2, tmp_path / "ranks", checked):
        assert (agreed[0], agreed[2]) == (1, None)
        assert (repeated[0], repeated[2]) == (2, None)
        assert repeated[1] < 1e-5
        assert stale[0] == 2
        assert stale[1] == pytest.approx(20.0, abs=1e-4)
        assert "version 5 of the weights" in str(stale[2])
