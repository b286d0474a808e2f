"""Commands with LoRA: train, resume, eval, export merged, --dry-run, and one line for each mistake."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.experiments import export_merged
from bandpo_cli.models.load import embedded_model_path, load_policy
from tests.cli.eval_command import record_of, samples_of, succeed, usage_error
from tests.cli.train_runs import SMALL, check_equal, drop_checkpoints, sets, truncate_metrics

LORA = [*sets("model.lora.rank=4 model.lora.alpha=12"), "--lr", "1e-2"]
EVAL = "--task countdown --set task.max_number=5 --max-tokens 8 --n 4 --k 1 --limit 4 --no-mlflow".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run `lora` of 2 steps."""
    place = tmp_path_factory.mktemp("lora")
    succeed("train", "--steps", "2", *SMALL, *LORA, "--name", "lora", cwd=place)
    return place


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


@pytest.mark.slow
def test_the_run_is_described_with_its_adapters(tmp_path):
    printed = " ".join(succeed("train", *SMALL, *LORA, "--dry-run", cwd=tmp_path).out.split())
    assert "LoRA of rank 4, alpha 12, on all linear layers but the output layer" in printed
    assert "LoRA trains 0.1M of 1.1M parameters; training all weights takes" in printed


@pytest.mark.slow
def test_the_merged_model_is_a_plain_one_with_the_weights_of_the_run(place, tmp_path):
    checkpoint = place / "runs" / "lora" / "checkpoints" / "step-000002"
    done = succeed("export", "merged", "lora", "--out", str(tmp_path / "out"), cwd=place)
    assert str(tmp_path / "out") in done.out.replace("\n", "")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    found, base = weights_of(tmp_path / "out"), weights_of(embedded_model_path())
    expected = load_policy(ModelConfig(path=str(checkpoint), device="cpu"), for_training=False).model
    assert found.keys() == base.keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(found[name], weight)
    assert sum(not torch.equal(found[name], base[name]) for name in base) > 10
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("1 2")["input_ids"] == AutoTokenizer.from_pretrained(checkpoint)("1 2")["input_ids"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o044


@pytest.mark.slow
def test_an_adapter_folder_is_merged_in_the_dtype_of_its_base(place, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(place / "runs" / "lora" / "checkpoints" / "step-000002", adapter)
    model = load_policy(ModelConfig(device="cpu", dtype="bfloat16"))
    model.model.save_pretrained(base)
    model.tokenizer.save_pretrained(base)
    stated = json.loads((adapter / "adapter_config.json").read_text())
    stated["base_model_name_or_path"] = str(base)
    (adapter / "adapter_config.json").write_text(json.dumps(stated))
    succeed("export", "merged", str(adapter), "--out", "merged", cwd=tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16


@pytest.mark.slow
def test_evaluations_of_run_adapter_and_merged_model_are_equal(place, tmp_path):
    export_merged("lora", tmp_path / "merged", place / "runs")
    adapter = place / "runs" / "lora" / "checkpoints" / "step-000002"
    found: list[Any] = []
    for number, model in enumerate(("lora", str(adapter), str(tmp_path / "merged"), "embedded")):
        folder = place / "runs" / f"evaluation-{number}"
        succeed("eval", "--model", model, *EVAL, "--seed", "0", "--name", folder.name, cwd=place)
        assert record_of(folder)["config"]["model"]["lora"] is None
        found.append(samples_of(folder)["text"].tolist())
    assert found[0] == found[1] == found[2]
    assert found[3] != found[0]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ("target_modules=[lm_head]", ["'lm_head'", "output layer"]),
        ("target_modules=[q_prj]", ["'q_prj'", "did you mean 'q_proj'"]),
        ("rank=4096", ["model.lora.rank = 4096", "has rank 128"]),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, settings, parts):
    flags = sets(f"model.lora.rank=2 model.lora.{settings}")
    usage_error("train", "--steps", "1", *SMALL, *flags, cwd=tmp_path, parts=parts)
    assert list(tmp_path.iterdir()) == []


def test_training_from_an_adapter_is_refused(place):
    adapter = "runs/lora/checkpoints/step-000002"
    verl = ["export", "verl", "--out", "job", "--set", "optim.warmup_steps=0"]
    for command in (["train", "--steps", "1"], verl):
        line = usage_error(*command, "--set", f"model.path={adapter}", cwd=place)
        assert ": an adapter; first: bandpo export merged " in line
        assert f"{adapter} --out DIR" in line


def test_what_cannot_be_exported_is_refused(place, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    for arguments, part in (
        (["nothing", "--out", "x"], "no such run or folder"),
        (["lora@1", "--out", "x"], "there are: 2"),
        (["embedded", "--out", "x"], "neither a run (RUN@STEP) nor a folder with an adapter"),
        (["lora", "--out", str(tmp_path / "there")], "exists already"),
        (["lora", "--out", str(tmp_path / "file" / "x")], "cannot be written"),
    ):
        assert part in usage_error("export", "merged", *arguments, cwd=place)
    assert not (place / "x").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"there", "file"}


@pytest.mark.slow
def test_a_run_resumes_after_a_crash(tmp_path):
    succeed("train", "--steps", "4", *SMALL, *LORA, "--name", "a", cwd=tmp_path)
    crashed, uninterrupted = tmp_path / "runs" / "a", tmp_path / "uninterrupted"
    shutil.copytree(crashed, uninterrupted)
    truncate_metrics(crashed, 3)
    drop_checkpoints(crashed, 4)
    succeed("train", "--resume", "a", cwd=tmp_path)
    check_equal(crashed, uninterrupted)
    assert yaml.safe_load((crashed / "config.yaml").read_text())["model"]["lora"]["rank"] == 4
