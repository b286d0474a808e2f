"""Training steps of pretrained models: all weights against plain torch, LoRA against peft, a kill and its resume."""

import json
import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from bandpo_cli.callbacks import StepReport
from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.sampling.sampler import TokenIds
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.build import build_components
from bandpo_cli.training.loop import train
from bandpo_cli.types import Completion
from tests.cli.eval_command import bandpo, succeed
from tests.cli.processes import wait_until
from tests.cli.train_runs import record
from tests.commands import Forked
from tests.real_models.pretrained import encoded_prompts, plain_logprobs, plain_model
from tests.tasks.stored_completions import jsonl

pytestmark = [pytest.mark.real_models, pytest.mark.usefixtures("one_thread")]

DELTA, LR, EPS = 0.01, 2.0, 1e-2


def settings(folder: Path, place: Path) -> dict[str, Any]:
    """Return settings of short runs in which the rewards of a group differ, whatever the model can do.

    The completions of a prompt are different texts, which differ from machine to machine; the grader, a module in
    `place`, gives each a reward of its own. The commands run in that folder.
    """
    (place / "by_text.py").write_text(
        "def judge(text, answer, extra):\n    return sum(text.encode()) % 97 / 97\n"
    )
    question = "Anna has {} apples and gets {} more."
    rows = [{"question": question.format(a, b), "answer": a + b} for a in range(2, 10) for b in range(2, 10)]
    template = "A funny line about this: {question}"
    train = [{"path": str(jsonl(place / "sums.jsonl", *rows))}]
    return {
        "model": {"path": str(folder), "device": "cpu", "dtype": "float32"},
        "task": {"name": "data", "train": train, "template": template, "grader": "by_text:judge"},
        "sampling": {"prompts": 2, "samples": 4, "max_tokens": 8, "max_prompt_tokens": 100},
        "optim": {"updates": 2, "lr": 2e-5, "warmup_steps": 0},
        "evaluation": {"every": 0},
        "tracking": {"mlflow": False},
    }


def test_a_killed_run_resumes_with_equal_records(folder, tmp_path):
    config, runs = tmp_path / "run.yaml", tmp_path / "runs"
    layer = {"steps": 2, "checkpoint": {"every": 1, "keep_last": 1, "keep_best": 0, "background": False}}
    short = settings(folder, tmp_path) | layer
    short["sampling"]["prompts"] = short["optim"]["updates"] = 1
    config.write_text(json.dumps(short))
    succeed("train", "-c", config, "--name", "complete", "--set", "checkpoint.every=0", cwd=tmp_path)
    process = Forked("train", "-c", str(config), "--name", "killed", cwd=tmp_path, OMP_NUM_THREADS="1")
    wait_until(process, (runs / "killed" / "checkpoints" / "step-000001").exists)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert record(runs / "killed")[-1]["step"] < 2
    done = bandpo("train", "--resume", "killed", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert "after step 1" in " ".join(done.out.split())
    assert record(runs / "killed") == record(runs / "complete")
    weights = [*runs.glob("*/checkpoints/step-000002/model.safetensors")]
    assert len(weights) == 2
    assert weights[0].read_bytes() == weights[1].read_bytes()


def advantages_of(rewards: Sequence[float], samples: int) -> list[float]:
    values = torch.tensor(rewards).double().view(-1, samples)
    scaled = (values - values.mean(dim=1, keepdim=True)) / (values.std(dim=1, keepdim=True) + 1e-6)
    return scaled.flatten().tolist()


def train_one_step(
    config: RunConfig, run: RunFolder
) -> tuple[StepReport, list[Sequence[int]], list[list[Completion]], dict[str, torch.Tensor]]:
    """Return the report, the prompts and completions of the sampler, and the trained weights."""
    components = build_components(config, build_task(config.task))
    sample, prompts, groups = components.sampler._sample_batch, [], []

    def recording(prompts_P: Sequence[TokenIds], *about: Any) -> list[list[Completion]]:
        sampled = sample(prompts_P, *about)
        prompts.extend(prompts_P)
        groups.extend(sampled)
        return sampled

    with closing(components), mock.patch.object(components.sampler, "_sample_batch", recording):
        (report,) = train(config, components, run)
    policy = components.policy.model
    # Tied weights are trained as one matrix and stored once.
    assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight
    return report, prompts, groups, {name: value.detach() for name, value in policy.named_parameters()}


def test_a_step_is_that_of_the_models_own_logits(folder, tmp_path, monkeypatch):
    """Two updates with the Band of total variation, whose bounds are (p ± δ)/p, against plain torch with autograd.

    AdamW has a large eps: it divides the gradient by its own size, which would magnify rounding errors.
    """
    bounds = {"method": "band", "divergence": "tv", "delta": DELTA}
    layer = {"steps": 1, "bounds": bounds, "optim": {"lr": LR, "eps": EPS}, "checkpoint": {"every": 0}}
    own = {"model": {"prompts": "raw"}, "sampling": {"samples": 6}}
    config = resolve([settings(folder, tmp_path), layer, own])
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(tmp_path, "run")
    report, prompts, groups, trained = train_one_step(config, run)
    model = plain_model(folder)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    pairs = zip(prompts, groups, strict=True)
    rows = [(prompt, completion.token_ids) for prompt, group in pairs for completion in group]
    rewards = pd.read_parquet(run.path / "samples" / "step-000001.parquet")["reward"]
    advantages = advantages_of(rewards.tolist(), config.sampling.samples)
    assert sum(advantage != 0 for advantage in advantages[: len(rows) // 2]) >= 4
    assert sum(advantage != 0 for advantage in advantages[len(rows) // 2 :]) >= 4
    with torch.no_grad():
        old = [plain_logprobs(model, *row) for row in rows]
    losses, norms, clipped, tokens = [], [], 0, 0
    for part in (range(len(rows) // 2), range(len(rows) // 2, len(rows))):
        loss = torch.zeros((), dtype=torch.float64)
        for i in part:
            ratio = (plain_logprobs(model, *rows[i]) - old[i]).exp()
            p = old[i].exp()
            lower, upper = ((p - DELTA) / p).clamp(min=0), torch.minimum((p + DELTA) / p, 1 / p).clamp(max=10)
            surrogate = torch.minimum(ratio * advantages[i], ratio.clamp(lower, upper) * advantages[i])
            loss = loss - surrogate.mean() / len(part)
            beyond = ratio > upper if advantages[i] > 0 else ratio < lower
            clipped += int(beyond.sum()) if advantages[i] else 0
            tokens += len(ratio)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    found = report.record
    assert found["optim/loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    assert found["optim/grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-3)
    assert clipped > 0, "no token is clipped, so the bounds are not tested"
    assert found["clip/active_fraction"] == pytest.approx(clipped / tokens, abs=1.5 / tokens)
    for name, parameter in model.named_parameters():
        change = parameter.detach() - before[name]
        error = trained[name] - parameter.detach()
        assert error.norm() <= 1e-2 * change.norm(), name


def test_lora_trains_the_adapters_that_peft_reads(folder, tmp_path):
    """The base weights stay; peft's model on the base, the merged export and the run's own policy agree."""
    from peft import PeftModel

    config = tmp_path / "lora.yaml"
    layer = {"model": {"lora": {"rank": 4}}, "optim": {"lr": 1e-2}}
    config.write_text(json.dumps(settings(folder, tmp_path)))
    (tmp_path / "more.yaml").write_text(json.dumps(layer | {"steps": 1, "checkpoint": {"every": 1}}))
    succeed("train", "-c", config, "-c", tmp_path / "more.yaml", "--name", "lora", cwd=tmp_path)
    checkpoint = tmp_path / "runs" / "lora" / "checkpoints" / "step-000001"
    assert not (checkpoint / "model.safetensors").exists()
    succeed("export", "merged", "lora", "--out", "merged", cwd=tmp_path)
    base, prompts = plain_model(folder), encoded_prompts(folder)
    ids = torch.tensor([prompts[0]])
    with torch.no_grad():
        before = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, str(checkpoint)).eval()(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
    assert (adapted - before).abs().max() > 1e-2, "the adapters have no effect, so nothing is tested"
    assert (merged - adapted).norm() <= 1e-3 * (adapted - before).norm()
