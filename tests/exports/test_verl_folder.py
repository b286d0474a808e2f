"""Exported folders: run.sh as a shell runs it, batches, data files, and no half-written folder."""

import base64
import hashlib
import math
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest

import bandpo_cli
from bandpo_cli.config.layers import read_layer, resolve, to_yaml
from bandpo_cli.config.run import with_dtype
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.experiments import export_verl
from bandpo_cli.exports import verl_files
from bandpo_cli.exports.verl_files import (
    batch_arithmetic,
    hydra_value,
    problem_from_json,
    settings_for_cluster,
)
from bandpo_cli.models.load import load_tokenizer
from bandpo_cli.sampling.prompt_encoding import PromptEncoder
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.types import Message, Problem
from tests.exports.folders import SMALL, run_script, small
from tests.text_model import save_text_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return an exported folder whose path has a blank and a quote."""
    out = tmp_path_factory.mktemp("exports") / "job of today"
    export_verl(small(), out, nodes=1, gpus_per_node=4)
    return out


def test_run_sh_calls_verl_with_every_override_and_further_arguments(folder):
    words, variables = run_script(folder, "trainer.total_epochs=2")
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    assert words[-1] == "trainer.total_epochs=2"
    overrides = dict(word.split("=", 1) for word in words[2:-1])
    assert len(overrides) == len(words) - 3
    assert overrides["data.train_files"] == f"'{folder}/train.parquet'"
    assert overrides["reward.custom_reward_function.path"] == f"'{folder}/reward.py'"
    assert overrides["actor_rollout_ref.model.path"] == f"'{folder}/model'"
    assert overrides["actor_rollout_ref.actor.optim.betas"] == "[0.9,0.999]"
    assert overrides["trainer.n_gpus_per_node"] == "4"
    assert overrides["trainer.experiment_name"] == "'job of today'"
    assert variables["VERL_USE_EXTERNAL_MODULES"] == "bandpo_cli.integrations.verl"
    prefix = "+ray_kwargs.ray_init.runtime_env.env_vars"
    assert overrides[f"{prefix}.VERL_USE_EXTERNAL_MODULES"] == "'bandpo_cli.integrations.verl'"
    assert overrides[f"{prefix}.MLFLOW_TRACKING_URI"] == f"'sqlite:///{folder}/mlflow.db'"
    assert all(Path(overrides[key].strip("'")).exists() for key in ("data.train_files", "data.val_files"))


def test_the_environment_chooses_the_mlflow_server_before_the_settings(tmp_path, folder):
    server = "http://tracker:5000"
    assert run_script(folder, MLFLOW_TRACKING_URI=server)[1]["MLFLOW_TRACKING_URI"] == server
    export_verl(small(tracking={"uri": "http://other:1/$HOME`x`"}), tmp_path / "named", gpus_per_node=1)
    assert run_script(tmp_path / "named")[1]["MLFLOW_TRACKING_URI"] == "http://other:1/$HOME`x`"
    without = small(tracking={"mlflow": False}, bounds={"method": "clip"})
    export_verl(without, tmp_path / "off", gpus_per_node=1)
    words, variables = run_script(tmp_path / "off")
    assert not {"MLFLOW_TRACKING_URI", "VERL_USE_EXTERNAL_MODULES"} & set(variables)
    assert "trainer.logger=[console]" in words


def test_config_yaml_is_the_configuration_and_the_readme_has_every_setting(folder):
    exported = resolve([read_layer(folder / "config.yaml")])
    assert exported == with_dtype(small(), on_gpu=True)
    assert exported.model.dtype == "bfloat16"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "| optim.lr | `5e-05` | `actor_rollout_ref.actor.optim.lr` |" in text
    assert "- none of the settings" in text
    assert "16 completions, 4 per GPU" in text
    warm = folder.parent / "warm"
    export_verl(small(optim={"warmup_steps": 4}), warm, gpus_per_node=1, allow_differences=True)
    assert "- optim.warmup_steps = 4: verl raises" in (warm / "README.md").read_text("utf-8")


def test_the_data_files_hold_the_problems_of_a_run(folder):
    task = build_task(small().task)
    sets = {"train": task.train_problems(), "heldout": task.heldout_sets()["countdown"][:10]}
    for name, problems in sets.items():
        rows = pq.read_table(folder / f"{name}.parquet").to_pylist()
        for index, (row, problem) in enumerate(zip(rows, problems, strict=True)):
            assert problem_from_json(row["extra_info"].pop("problem")) == problem
            split = "train" if name == "train" else "test"
            assert row == {
                "data_source": "countdown", "prompt": [{"role": "user", "content": problem.prompt}],
                "ability": "countdown", "reward_model": {"style": "rule", "ground_truth": problem.answer},
                "extra_info": {"index": index, "split": split},
            }  # fmt: skip


QUESTION = Problem("q", (Message("system", "Be brief."), Message("user", "What is 1+1?")), "2", "set", "math")


@pytest.mark.parametrize("special", [False, True], ids=["", "with a first token"])
def test_joined_messages_have_the_token_ids_of_a_run(tmp_path, special):
    """The tokenizer of a base model has no chat template; Llama's adds a first token to a text. A chat model keeps its
    own template."""
    from tokenizers.processors import TemplateProcessing

    model = save_text_model(tmp_path / "model", ["What is 1+1?"], layers=1)
    for prompts in ("auto", "chat"):
        config = resolve([SMALL, {"model": {"path": str(model), "prompts": prompts}}])
        assert verl_files.chat_template(config, [QUESTION]) is None
        ignored = config.model.model_copy(update={"chat_template_kwargs": {"thinking": True}})
        with pytest.raises(ConfigError, match="ignores this argument"):
            verl_files.chat_template(config.model_copy(update={"model": ignored}), [QUESTION])
    tokenizer = load_tokenizer(resolve([{"model": {"path": str(model)}}]).model)
    tokenizer.chat_template = None
    (model / "chat_template.jinja").unlink()
    if special:
        tokenizer.bos_token = "<|endoftext|>"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    tokenizer.save_pretrained(model)
    config = resolve([SMALL, {"model": {"path": str(model)}}])
    template = verl_files.chat_template(config, [QUESTION])
    (messages,) = verl_files.problem_table("test", {"": [QUESTION]}, True)["prompt"].to_pylist()
    reread = load_tokenizer(config.model)
    options = {"chat_template": template, "return_dict": False, "add_generation_prompt": True}
    ids = reread.apply_chat_template(messages, **options)
    (prompt,) = PromptEncoder(reread, "auto").encode([QUESTION])
    assert tuple(ids) == prompt.token_ids
    assert (ids[0] == 0) is special


def test_the_copied_model_has_the_tokens_that_verl_looks_up(folder):
    paths = ("embedded", str(folder / "model"))
    original, copied = (load_tokenizer(resolve([{"model": {"path": path}}]).model) for path in paths)
    assert copied.encode("\n", add_special_tokens=False) == [20]
    assert copied.convert_tokens_to_ids("<|im_end|>") == 21
    for text in ("1 3 7 8=24:", "(1+2)*3"):
        assert copied.encode(text) == original.encode(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (True, "true"), (5e-05, "5e-05"), (math.inf, "inf"), (-1, "-1"), ("vllm", "vllm"),
        ("true", "'true'"), ("0.5_2.0", "'0.5_2.0'"), ("it's", "'it\\'s'"), ([1, "a b"], "[1,'a b']"),
        ({"eps": 1e-8}, "{eps:1e-08}"), ((0.9, 0.999), "[0.9,0.999]"), ("{% x %}", "'{% x %}'"),
    ],
)  # fmt: skip
def test_values_in_hydras_syntax(value, text):
    assert hydra_value(value) == text


def test_batches_are_counted_per_update_and_gpu():
    of_step, of_update, _, of_pass = batch_arithmetic(small(), 8, problems=100)
    assert of_step == "per step: 8 prompts × 4 completions = 32 completions; GPUs: 8, vLLM engines: 8"
    assert of_update == "per update (2 per step): 16 completions, 2 per GPU"
    assert of_pass == "per pass over the 100 training problems: 12 steps"


@pytest.mark.parametrize(
    ("sections", "gpus", "problems", "message"),
    [
        ({}, 3, 100, r"an update has 8 / 2 × 4 = 16 completions .* multiple of the 3 GPUs"),
        ({}, 32, 100, "multiple of the 32 GPUs"),
        ({}, 1, 7, "sampling.prompts = 8: there are 7 training problems"),
        ({"sampling": {"vllm": {"tensor_parallel": 3}}}, 4, 100, "tensor_parallel = 3 does not divide"),
    ],
)
def test_batches_that_verl_cannot_split_are_refused(sections, gpus, problems, message):
    with pytest.raises(ConfigError, match=message):
        batch_arithmetic(small(**sections), gpus, problems)


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    write = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("bandpo_cli.experiments.export_import.write_text", write)
    with pytest.raises(KeyboardInterrupt):
        export_verl(small(), tmp_path / "job", gpus_per_node=1)
    assert list(tmp_path.iterdir()) == []


def test_a_local_model_is_named_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_text_model(tmp_path / "model", ["1"], layers=1)
    exported = export_verl(small(model={"path": "model"}), tmp_path / "job", gpus_per_node=1)
    assert exported.overrides["actor_rollout_ref.model.path"] == str(tmp_path / "model")
    assert not (tmp_path / "job" / "model").exists()


def test_the_wheel_of_the_package_is_complete_and_can_be_installed(folder, tmp_path):
    """The installer checks nothing of RECORD here, so its hashes are compared with the files."""
    (wheel,) = folder.glob("bandpo-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    about = metadata.PathDistribution(tmp_path / f"bandpo-{bandpo_cli.__version__}.dist-info")
    assert (about.metadata["Name"], about.version) == ("bandpo", bandpo_cli.__version__)
    assert {point.group for point in about.entry_points} == {"console_scripts", "verl.plugins"}
    assert all(file.locate().is_file() for file in about.files)
    for file in about.files:
        if file.hash is not None:
            digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
            assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value
    package = Path(bandpo_cli.__file__).parent
    installed = {str(path.relative_to(package.parent)) for path in package.rglob("*.py")}
    assert installed <= {str(file) for file in about.files}


def test_scripts_are_bash_and_the_head_waits_for_the_other_machines(folder):
    for script in ("run.sh", "cluster.sh"):
        subprocess.run(["bash", "-n", folder / script], check=True)
    text = (folder / "cluster.sh").read_text()
    assert "#SBATCH --nodes=1\n" in text
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert "sbatch cluster.sh" in (folder / "README.md").read_text(encoding="utf-8")


def test_a_run_is_exported_without_the_settings_of_its_machine(tmp_path):
    own = {"model": {"dtype": "float32", "device": "cpu"}, "sampling": {"engine": "transformers"}}
    config = small(own, steps=7)
    RunFolder.create(tmp_path, "first").write_config(to_yaml(config))
    changed, lines = settings_for_cluster("first", [], tmp_path)
    assert (changed.model.dtype, changed.model.device, changed.sampling.engine) == ("auto", "auto", "auto")
    assert changed.steps == 7
    note = "model.dtype = float32 of the machine of the run is bfloat16; --set model.dtype=float32"
    assert lines[0] == f"{note} keeps it"
    assert len(lines) == 3
    kept, lines = settings_for_cluster("first", [{"model": {"dtype": "float32"}}], tmp_path)
    assert kept.model.dtype == "float32"
    assert [line.partition(" ")[0] for line in lines] == ["model.device", "sampling.engine"]
    with pytest.raises(UserError, match=r"no run 'frist' .*did you mean 'first'"):
        settings_for_cluster("frist", [], tmp_path)
