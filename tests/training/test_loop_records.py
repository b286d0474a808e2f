"""Records, updates and memory of the training loop, computed from the recorded calls."""

import gc
import json
import math
import weakref
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from bandpo_cli.errors import GraderFailedError
from bandpo_cli.models import load, packing
from bandpo_cli.models.load import release_cached_memory
from bandpo_cli.storage.checkpoints import model_checkpoints
from bandpo_cli.training import loop, update
from bandpo_cli.types import GRADER_ERROR, Grade, Problem
from benchmarks.device_reads import DeviceReads, host_copy
from tests.training import recording as recording_module
from tests.training.recording import (
    Recording,
    execute,
    hashed_grade,
    prepare_run,
    run,
    same_weights,
    shaped_reward,
)

CONTRACT = {
    "train": ["reward", "accuracy", "entropy", "response_length"],
    "clip": ["active_fraction", "upper_fraction", "lower_fraction", "outside_fraction"],
    "ratio": ["mean", "max"],
    "kl": ["old_new"],
    "sampler": ["logprob_gap_mean", "logprob_gap_max"],
    "optim": ["loss", "grad_norm", "lr"],
    "time": ["step"],
}
KEYS = {f"{group}/{name}" for group, names in CONTRACT.items() for name in names}
"""Keys that every training step has in metrics.jsonl."""


def test_every_step_has_the_documented_metrics(recorded):
    for step in range(1, 6):
        assert not KEYS - recorded.line(step).keys()


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def test_dropped_groups_count_in_the_metrics_and_stay_in_the_samples(tmp_path, small_model):
    recording = run(
        tmp_path / "a",
        small_model,
        {"steps": 1, "sampling": {"dynamic": True}, "evaluation": {"every": 0}},
        {"reward": {"overlong_buffer": 0}},
        uniform=lambda ids: set(ids[:3]),
    )
    assert len(recording.steps[1].training_groups()) == 8
    assert recording.line(1)["train/uniform_group_fraction"] == 3 / 8
    check_samples(recording, 1)


def check_samples(recording: Recording, step: int) -> None:
    """Require the sample table of a step to hold every recorded rollout, in order."""
    expected = [
        {
            "source": item.problem.source,
            "problem_id": item.problem.id,
            "question": item.problem.prompt,
            "prompt": item.problem.prompt,
            "reference": item.problem.answer,
            "grader": item.problem.grader,
            "extra": json.dumps(dict(item.problem.extra)),
            "text": item.text,
            "reward": pytest.approx(shaped_reward(item, recording.config), rel=1e-12),
            "accuracy": float(item.grade.correct),
            "length": len(item.completion.token_ids),
            "finish_reason": item.completion.finish_reason,
            "verdict": item.grade.verdict,
            "logprob_sum": pytest.approx(sum(item.completion.logprobs), rel=1e-9),
        }
        for group in recording.steps[step].training_groups()
        for item in group
    ]
    table = pd.read_parquet(recording.folder.path / "samples" / f"step-{step:06d}.parquet")
    rows = table.to_dict("records")
    assert rows == expected


def test_the_sample_table_holds_the_recorded_rollouts(recorded):
    for step in range(1, 6):
        check_samples(recorded, step)


def test_token_tables_are_written_at_evaluated_steps(recorded):
    folder = recorded.folder.path / "tokens"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step-00000{step}.parquet" for step in (2, 4, 5)
    ]
    for step in (2, 4, 5):
        groups = recorded.steps[step].training_groups()
        count = sum(len(item.completion.token_ids) for group in groups for item in group)
        assert len(pd.read_parquet(folder / f"step-{step:06d}.parquet")) == count


def evaluation_by_hand(recording: Recording, step: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return metrics by set and problem id; pass@2 counts pairs of the three completions."""
    groups = iter(recording.steps[step].evaluation_groups())
    by_hand: dict[str, dict[str, dict[str, float]]] = {label: {} for label in recording.components.heldout}
    for label, problems in recording.components.heldout.items():
        for problem in problems:
            group = next(groups)
            assert {item.problem.id for item in group} == {problem.id}
            correct = [item.grade.correct for item in group]
            verdicts = [item.grade.verdict for item in group]
            by_hand[label][problem.id] = {
                "mean_at_3": mean(correct),
                "pass_at_2": mean([any(pair) for pair in combinations(correct, 2)]),
                "answer_format_rate": 1 - verdicts.count("malformed") / 3,
                "truncation_rate": mean([item.completion.finish_reason == "length" for item in group]),
                "response_length": mean([len(item.completion.token_ids) for item in group]),
                "timeout_rate": verdicts.count("timeout") / 3,
                "grader_error_rate": verdicts.count("grader-error") / 3,
                "not_applicable_rate": verdicts.count("not-applicable") / 3,
            }
    assert next(groups, None) is None
    return by_hand


@pytest.mark.parametrize("step", [0, 2, 4, 5])
def test_evaluation_metrics_are_those_of_the_recorded_grades(recorded, step):
    """Evaluations use the grader's correctness, not the shaped reward."""
    by_hand, line = evaluation_by_hand(recorded, step), recorded.line(step)
    written = json.loads((recorded.folder.path / "evals" / f"step-{step:06d}.json").read_text())
    assert written["step"] == step
    assert list(written["sets"]) == ["first", "second"]
    for label, problems in by_hand.items():
        scores = written["sets"][label]
        assert scores["completions"] == 3 * len(problems)
        assert list(scores["by_problem"]) == list(problems)
        for id_, values in problems.items():
            assert {name: scores["by_problem"][id_][name] for name in values} == pytest.approx(values)
        for name in next(iter(problems.values())):
            expected = pytest.approx(mean([values[name] for values in problems.values()]))
            assert line[f"eval/{label}/{name}"] == expected
            assert scores["metrics"][name]["value"] == expected


def test_evaluations_are_due_at_the_start_every_second_step_and_the_end(recorded):
    lines = recorded.folder.read_metrics()
    assert [line["step"] for line in lines] == list(range(6))
    assert [line["step"] for line in lines if any(key.startswith("eval/") for key in line)] == [0, 2, 4, 5]
    names = sorted(path.name for path in (recorded.folder.path / "evals").iterdir())
    assert names == [f"step-00000{step}.json" for step in (0, 2, 4, 5)]
    assert not [key for key in lines[0] if not key.startswith(("step", "eval/", "time/", "compute/"))]


def check_checkpoint(recording: Recording, step: int) -> None:
    """Require a checkpoint to hold the weights and progress after the updates of its step."""
    folder = recording.folder.checkpoint_dir(step)
    state = json.loads((folder / "trainer" / "state.json").read_text())
    counts = (state["step"], state["updates"], state["position"])
    assert counts == (step, 2 * step, 4 * step)
    saved = load_file(folder / "model.safetensors")
    weights = recording.steps[step].updates[-1].weights
    assert saved
    assert same_weights(saved, {name: weights[name] for name in saved})
    assert weights.keys() - saved.keys() <= {"lm_head.weight"}, "tied to the embeddings"


def test_checkpoints_hold_the_state_after_their_step_and_precede_its_line(recorded):
    assert list(model_checkpoints(recorded.folder)) == [3, 5]
    for step in (3, 5):
        check_checkpoint(recorded, step)
    at_line = {step: value.checkpoints_at_line for step, value in recorded.steps.items()}
    assert at_line == {0: [], 1: [], 2: [], 3: [3], 4: [3], 5: [3, 5]}


def test_old_checkpoints_are_removed_after_the_line_of_the_new_one(tmp_path, small_model):
    keep = {
        "steps": 3,
        "checkpoint": {"every": 1, "keep_last": 1, "keep_best": 0},
        "evaluation": {"every": 0},
    }
    recording = run(tmp_path / "a", small_model, keep)
    at_line = {step: value.checkpoints_at_line for step, value in recording.steps.items()}
    assert at_line == {1: [1], 2: [1, 2], 3: [2, 3]}
    assert list(model_checkpoints(recording.folder)) == [3]


def test_the_callback_receives_the_phases_of_a_step_in_order(recorded):
    update = ["sample", "grade", "logprobs", "update", "record", "sync"]
    extra = {0: ["eval"], 1: [], 2: ["eval"], 3: ["checkpoint"], 4: ["eval"], 5: ["eval", "checkpoint"]}
    for number, step in recorded.steps.items():
        expected = [*(update if number else []), *extra[number]]
        assert step.phases == expected
        times = {key for key in recorded.line(number) if key.startswith("time/")}
        assert times == {"time/step", "time/total", *(f"time/{phase}" for phase in expected)}


def test_the_report_of_a_step_is_its_line_and_its_first_rollout(recorded):
    for number, step in recorded.steps.items():
        assert step.report.record == recorded.line(number)
        if not number:
            assert step.report.sample is None
            continue
        first = step.training_groups()[0][0]
        assert step.report.sample.completion == first.completion
        assert (step.report.sample.problem, step.report.sample.text) == (first.problem, first.text)


@pytest.mark.parametrize(("first", "last"), [(0, 2), (3, 4)])
def test_a_stop_saves_a_checkpoint_of_the_last_complete_step(tmp_path, small_model, first, last):
    """A later first step skips the evaluation before training."""
    recording = prepare_run(tmp_path / "a", small_model, {"evaluation": {"every": 4}})
    execute(recording, first=first, stop=lambda: last in recording.steps)
    assert list(recording.steps) == list(range(first, last + 1))
    assert recording.steps[first].order[0] == "sample"
    assert len(recording.steps[first].training) == (1 if first else 0)
    assert recording.current.order == [], "no call of the next step"
    assert list(model_checkpoints(recording.folder)) == sorted({last} | ({3} if last > 3 else set()))
    if not first:
        check_checkpoint(recording, last)


def test_a_stop_before_the_first_step_writes_no_checkpoint(tmp_path, small_model):
    recording = execute(prepare_run(tmp_path / "a", small_model), stop=lambda: True)
    assert list(recording.steps) == [0]
    assert not model_checkpoints(recording.folder)


def test_a_stop_does_not_rewrite_an_existing_checkpoint(tmp_path, small_model):
    recording = prepare_run(tmp_path / "a", small_model, {"checkpoint": {"every": 1}})
    written: list[int] = []

    def stop() -> bool:
        if 1 in recording.steps:
            written.append((recording.folder.checkpoint_dir(1) / "config.json").stat().st_ino)
        return bool(written)

    execute(recording, first=1, stop=stop)
    assert list(recording.steps) == [1]
    assert written == [(recording.folder.checkpoint_dir(1) / "config.json").stat().st_ino]


@pytest.mark.parametrize(("failing", "answers", "lines"), [("eval", 24, 0), ("training", 16, 1)])
def test_a_step_with_grader_errors_only_ends_the_run(
    tmp_path, small_model, monkeypatch, failing, answers, lines
):
    """Held-out problems are graded before training; errors on them alone, or on the training problems alone."""
    recording = prepare_run(tmp_path / "a", small_model)
    heldout = {item.id for problems in recording.components.heldout.values() for item in problems}

    def grade(problem: Problem, text: str) -> Grade:
        return GRADER_ERROR if (problem.id in heldout) == (failing == "eval") else hashed_grade(problem, text)

    monkeypatch.setattr(recording_module, "hashed_grade", grade)
    with pytest.raises(
        GraderFailedError, match=rf"all {answers} answers are .* grader 'countdown': no message"
    ):
        execute(recording)
    assert len(recording.folder.read_metrics()) == lines
    assert not list(recording.folder.path.glob("samples/*"))


ONE_STEP: dict[str, Any] = {"steps": 1, "evaluation": {"every": 1}, "reward": {"overlong_buffer": 0}}
"""One step with its token table; rewards depend on the grader alone."""


def texts_by_hand(recording: Recording, ids: tuple[int, ...]) -> str:
    """Return token ids as text; in this vocabulary a token is a character, and the first two are special."""
    names = {number: name for name, number in recording.components.policy.tokenizer.get_vocab().items()}
    assert {names[0], names[1]} == {"<pad>", "<eos>"}
    return "".join(names[item].replace("Ġ", " ") for item in ids if item > 1)


@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_the_grader_receives_the_text_of_each_completion_with_its_own_problem(recorded, kind):
    groups = [group for step in recorded.steps.values() for group in getattr(step, f"{kind}_groups")()]
    for group in groups:
        assert len({item.problem.id for item in group}) == 1
        for entry in group:
            assert texts_by_hand(recorded, entry.prompt_ids) == entry.problem.prompt
            assert entry.text == texts_by_hand(recorded, entry.completion.token_ids)
    assert len({group[0].problem.id for group in groups}) == (20 if kind == "training" else 8)
    assert any(1 in item.completion.token_ids for group in groups for item in group)


def test_the_trainers_own_model_is_corrected_for_in_16_bits_only(recorded, tmp_path, small_model):
    """The real sampler, which draws from logits rounded to bfloat16: w = π_old/π_sampler of every token, by hand."""
    assert not [key for key in recorded.line(1) if key.startswith("sampler/importance")]
    assert recorded.line(1)["sampler/logprob_gap_max"] < 1e-4
    recording = run(tmp_path / "a", small_model, ONE_STEP, {"model": {"dtype": "bfloat16"}})
    groups, line = recording.steps[1].training_groups(), recording.line(1)
    reported = [logprob for group in groups for item in group for logprob in item.completion.logprobs]
    table = pd.read_parquet(recording.folder.path / "tokens" / "step-000001.parquet")
    weights = [math.exp(old - new) for old, new in zip(table["old_logprob"], reported, strict=True)]
    assert max(weights) > 1.003, "no token differs, so nothing is tested"
    assert line["sampler/importance_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-6)
    assert line["sampler/importance_max"] == pytest.approx(max(weights), rel=1e-6)


def test_weights_change_only_at_updates(recorded):
    for number in range(1, 6):
        weights = [
            recorded.weights_before(number),
            *(update.weights for update in recorded.steps[number].updates),
        ]
        assert not any(same_weights(one, other) for one, other in pairwise(weights))
    assert same_weights(
        recorded.steps[5].updates[-1].weights, dict(recorded.components.policy.model.state_dict())
    )


def test_no_gradient_and_no_value_per_token_is_held_when_the_sampler_syncs(
    tmp_path, small_model, monkeypatch
):
    """Gradients take 4 bytes per parameter, and the values of all tokens of a step some hundred megabytes.

    An evaluation begins with an empty cache.
    """
    prepared = prepare_run(tmp_path / "run", small_model, {"steps": 2, "model": {"dtype": "bfloat16"}})
    optimizer = prepared.components.optimizer
    experiences: list[weakref.ref[Any]] = []
    at_sync: list[tuple[bool, bool]] = []
    prepare, sync = loop.prepare_updates, prepared.components.sampler.sync

    def remember(*arguments: Any, **settings: Any) -> Any:
        batches = prepare(*arguments, **settings)
        experiences.extend(weakref.ref(batch) for batch in batches)
        return batches

    order: list[str] = []
    sample_batches = loop.sample_batches

    def evaluate(*arguments: Any, **settings: Any) -> Any:
        order.append("evaluate")
        return sample_batches(*arguments, **settings)

    def observe(*arguments: Any) -> None:
        gradients = [item.grad is not None for pair in optimizer._narrow for item in pair]
        at_sync.append((any(gradients), any(experience() is not None for experience in experiences)))
        sync(*arguments)

    monkeypatch.setattr(loop, "release_cached_memory", lambda: order.append("release"))
    monkeypatch.setattr(loop, "sample_batches", evaluate)
    monkeypatch.setattr(loop, "prepare_updates", remember)
    monkeypatch.setattr(prepared.components.sampler, "sync", observe)
    gc.disable()  # nothing may depend on the time of a collection
    try:
        list(loop.train(prepared.config, prepared.components, prepared.folder))
    finally:
        gc.enable()
    assert order == ["release", "evaluate"] * 2
    assert at_sync == [(False, False)] * 2
    assert len(experiences) == 4  # two updates per step: the references are to objects that existed


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {
            "model": {"dtype": "bfloat16"},  # the sampler's log-probs are not exact
            "objective": {"importance": "sequence-mask", "aggregation": "token-mean", "off_policy_mask": 0.5},
            "bounds": {"method": "gspo"},
        },
    ],
)
def test_a_step_waits_for_the_device_once_per_update(tmp_path, small_model, monkeypatch, settings):
    one_step = {"steps": 1, "evaluation": {"every": 0}}
    prepared = prepare_run(tmp_path / "run", small_model, one_step | settings)
    reads = DeviceReads()
    for module in (packing, update):
        monkeypatch.setattr(module, "host_copy", host_copy)
    with reads:
        for _ in loop.train(
            prepared.config,
            prepared.components,
            prepared.folder,
            watch=lambda phase: setattr(reads, "phase", phase),
        ):
            pass
    updates = prepared.config.optim.updates
    assert updates == 2
    tokens = prepared.config.sampling.max_tokens
    assert (
        tokens <= reads.reads["sample"] <= 2 * tokens + 1
    )  # per token how many completions are left, and which
    # the check of an update before its weights change
    assert [reads.reads[phase] for phase in ("logprobs", "update", "record")] == [0, updates, 0]


@pytest.mark.parametrize("initialized", [True, False])
def test_the_cache_is_emptied_after_garbage_collection_if_there_is_a_gpu(monkeypatch, initialized):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(load.gc, "collect", lambda: calls.append("collect"))
    release_cached_memory()
    assert calls == (["collect", "empty"] if initialized else [])


@pytest.mark.slow
def test_with_lora_the_adapters_alone_are_trained_and_saved(tmp_path, small_model):
    layer = {"steps": 2, "model": {"lora": {"rank": 4}}, "objective": {"reference_kl": 0.01}}
    recording = run(tmp_path / "a", small_model, layer)
    last = recording.steps[2].updates[-1].weights
    moved = {name for name, weight in last.items() if not torch.equal(weight, recording.initial[name])}
    assert moved == {name for name in last if "lora_" in name}
    assert recording.components.reference.model is recording.components.policy.model
    # In the first step the policy is its reference up to the second update; later it moves away.
    assert recording.line(2)["kl/ref"] > recording.line(1)["kl/ref"] >= 0.0
    assert all(recording.line(step)["sampler/logprob_gap_max"] < 1e-5 for step in (1, 2))
    files = {path.name for path in recording.folder.checkpoint_dir(2).iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "trainer"}
    assert not {"config.json", "model.safetensors"} & files
