"""Ordinary mistakes, and the habits of people who come from other trainers: one line that says what to type."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from bandpo_cli.__main__ import main
from bandpo_cli.config.files import describe_config, find_config, shipped_configs
from bandpo_cli.config.habits import SETTINGS_ELSEWHERE
from bandpo_cli.config.layers import flatten, resolve
from bandpo_cli.config.methods import BandSettings, ClipSettings
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import METHODS
from tests.cli.eval_command import Done

sweep_module = importlib.import_module("bandpo_cli.cli.sweep")  # the package has the function of that name

FILES = {
    "bad-key.yaml": "steps: 3\noptim:\n  lr: 1.0e-4\n  learning_rate: 3\n",
    "bad-value.yaml": "optim:\n  updates: 4\n  lr: -1\n",
    "bad-section.yaml": "steps: 3\n\noptimizer:\n  lr: 1\n",
    "bad-method.yaml": "bounds:\n  method: grop\n",
    "list.yaml": "- a\n",
    "tabs.yaml": "optim:\n\tlr: 1\n",
    "bad-sweep.yaml": "axes:\n  bounds.delta: [0.1, 0.2]\nseds: [1]\n",
    "problems.csv": "question,answer\n1+1?,2\n",
    "image.jsonl": '{"messages": [{"role": "user", "content": [{"type": "image"}]}], "answer": 1}\n',
    "roles.json": '[{"prompt": [{"role": "usr", "content": "1+1?"}], "answer": 2}]',
    "runs/first/config.yaml": "steps: 3\n",
    "runs/first/checkpoints/step-000002/config.json": "{}",
}

MISTAKES: dict[str, str] = {
    # words of other trainers
    "train --learning-rate 1e-5": "No such option: --learning-rate; use --set optim.lr=VALUE",
    "train --batch-size 8": "use --set sampling.prompts=VALUE",
    "train --num-generations 8": "use --set sampling.samples=VALUE",
    "train --max-completion-length 8": "use --set sampling.max_tokens=VALUE",
    "train --epochs 3": "use --set steps=VALUE",
    "train --beta 0.1": "use --set objective.reference_kl=VALUE",
    "train --temperature 0.7": "use --set sampling.temperature=VALUE",
    "train --set lr=1e-5": "lr: no such setting (did you mean 'optim.lr'?)",
    "train --set optim.learning_rate=1e-5": "(did you mean 'optim.lr'?)",
    "train --set sampling.n=8": "(did you mean 'sampling.samples'?)",
    "train --set sampling.max_new_tokens=8": "(did you mean 'sampling.max_tokens'?)",
    "train --set actor.clip_ratio_high=0.28": "actor: no such setting",
    "train --set bounds.clip_ratio_high=0.28": "(did you mean 'bounds.eps_high'?)",
    "train --set optim.weight_deca=0": "(did you mean 'weight_decay'?)",
    "eval --learning-rate 3": "use --set optim.lr=VALUE",
    # several values where one is expected
    "train --delta 0.01,0.05": "--delta 0.01,0.05: train takes one value; bandpo sweep --delta "
        "0.01,0.05 compares several",
    "train --divergence kl,tv": "bandpo sweep --divergence kl,tv compares several",
    "train --method clip,band": "bandpo sweep --method clip,band compares several",
    "train --lr 1e-5,1e-6": "bandpo sweep --lr 1e-5,1e-6 compares several",
    "train --delta big": "--delta big: a number is expected",
    "train --max-tokens many": "--max-tokens many: an integer is expected",
    "train --max-tokens 1.5": "--max-tokens 1.5: an integer is expected",
    # values out of range
    "train --delta 0": "bounds.delta = 0",
    "train --delta=-0.1": "bounds.delta = -0.1",
    "train --delta nan": "bounds.delta = nan",
    "train --lr 0": "optim.lr = 0",
    "train --max-tokens 0": "sampling.max_tokens = 0",
    "train --steps 0": "steps = 0",
    "train --seed -1": "seed = -1",
    "train --set sampling.temperature=0": "sampling.temperature = 0",
    "train --set optim.betas=[0.9]": "optim.betas",
    "train --set optim.updates=2.5": "optim.updates = 2.5",
    # names
    "train --method grop": "bounds.method = 'grop': unknown",
    "train --method gpso": "bounds.method = 'gpso': unknown (did you mean 'gspo'?)",
    "train --method dppo --divergence chi2": "bounds.divergence = 'chi2': unknown; allowed: kl, tv",
    "train --method dppo --divergence tvv": "bounds.divergence = 'tvv': unknown (did you mean 'tv'?); allowed: kl, tv",
    "train --method dppo --delta 0": "bounds.delta = 0",
    "train --method dppo --set bounds.divergence=[kl]": "bounds.divergence = ['kl']",
    "train --method sapo --delta 0.1": "bounds.delta: no such setting of 'sapo'; known: method, tau_positive",
    "train --method cispo --divergence kl": "bounds.divergence: no such setting of 'cispo'",
    "train --method sapo --set bounds.tau_postive=2": "(did you mean 'tau_positive'?)",
    "train --method drpo --set bounds.eps=0": "bounds.eps = 0",
    "train --set objective.importance=token-masked": "(did you mean 'token-mask'?)",
    "train --set objective.importance_floor=0.5": "importance_floor = 0.5 has no effect",
    "sweep --method clip,gpso": "(did you mean 'gspo'?)",
    "sweep --method clip,sapo --delta 0.1,0.2": "the axis 'bounds.delta' applies to no arm",
    "bounds 0.1 --compare sapo": "sapo has no interval of ratios: its gate falls smoothly and has no edge; allowed: ",
    "train --divergence kullback": "bounds.divergence = 'kullback'",
    "train --sampler vlm": "vlm",
    "train --task coutdown": "(did you mean 'countdown'?)",
    "train --task gsm": "gsm8k",
    "train --task nosuch.csv": "--task nosuch.csv: there is no such file",
    "train --task problem.csv": "--task problem.csv: there is no such file (did you mean 'problems.csv'?)",
    # chat messages as questions
    "train --model some/model --task image.jsonl": "image.jsonl, row 1: the chat messages of 'messages': "
        "message 1 has a part of the type 'image' in its content; only text is supported",
    "train --model some/model --task roles.json": "roles.json, row 1: the chat messages of 'prompt': "
        "message 1 has the role 'usr' (did you mean 'user'?)",
    "train --model nosuch/folder/model": "nosuch/folder/model",
    "train --name a/b": "--name 'a/b' cannot be used",
    "train --name first": "--name first: runs/first exists already; try --name first-2",
    "train --set optim": "write it as section.key=value",
    "train --set optim.lr": "write it as section.key=value",
    "train --runs-dir problems.csv": "is a file; name a folder",
    # files of settings
    "train -c nosuch.yaml": "--config nosuch.yaml: no such file, and no configuration of that name",
    "train -c paper/bse": "(did you mean 'paper/base'?); `bandpo configs` lists them",
    "train -c bad-key.yaml": "--config bad-key.yaml, line 4: optim.learning_rate: no such setting "
        "(did you mean 'optim.lr'?)",
    "train -c bad-value.yaml": "--config bad-value.yaml, line 3: optim.lr = -1: ",
    "train -c bad-section.yaml": "--config bad-section.yaml, line 3: optimizer: no such setting (did "
        "you mean 'optim'?)",
    "train -c bad-method.yaml": "--config bad-method.yaml, line 2: bounds.method = 'grop': unknown",
    "train -c list.yaml": "--config list.yaml: expected `section:` with `key: value` lines, found a list",
    "train -c tabs.yaml": "--config tabs.yaml, line 2: not readable as YAML",
    "train -c runs": "--config runs: is a directory",
    "configs show paper/bas": "(did you mean 'paper/base'?)",
    # resume
    "train --resume frist": "no run 'frist' in runs (did you mean 'first'?)",
    "train --resume runs/first/checkpoints/step-000002": "name the run: bandpo train --resume first",
    "train --resume first --name b": "leave out --name",
    "train --resume first --set optim.lr=1": "optim.lr = 1.0 (the run has ",
    # sweeps and evaluations
    "sweep": "nothing is swept: give values to compare, for example --delta 0.01,0.05,0.1 --seeds 0,1,2",
    "sweep --steps 10": "nothing is swept",
    "sweep --delta 0.1,": "an empty item; separate values by commas",
    "sweep --delta 0.1,x": "bounds.delta = 'x'",
    "sweep --lr 1e-5,fast": "optim.lr = 'fast'",
    "sweep --seeds a": "a",
    "sweep --axis bounds.delt=1,2": "did you mean 'delta'",
    "sweep --delta 0.1 --jobs 0": "--jobs",
    "sweep --delta 0.1,0.2 --executor slurm": "--executor slurm: unknown",
    "sweep --resume nosuch": "no sweep 'nosuch'",
    "sweep bad-sweep.yaml": "bad-sweep.yaml, line 3: seds: no such setting (did you mean 'seeds'?)",
    "eval --model nosuch": "nosuch",
    "eval --n 0": "Invalid value for '--n'",
    "eval --samples nosuch.jsonl": "nosuch.jsonl",
    "trian": "No such command 'trian'",
}  # fmt: skip
"""A command and a part of the one line that it prints. Nothing is written and nothing heavy is loaded."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Done:
    monkeypatch.setattr(sys, "argv", ["bandpo", *command.split()])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    return Done(end.value.code, out, err)


def files(folder: Path) -> list[Path]:
    """Return all files and folders, without the lock that a resume takes while it reads the run."""
    return sorted(path for path in folder.rglob("*") if path.name != ".lock")


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_that_helps(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(folder)
    done = run(command, monkeypatch, capsys)
    assert (done.code, done.out) == (2, ""), done.out
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert MISTAKES[command] in done.err
    assert files(folder) == before


def test_a_later_flag_is_not_blamed_on_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run("train -c bad-value.yaml --lr 2e30", monkeypatch, capsys)
    assert done.err.startswith("error: optim.lr = 2e+30")


@pytest.mark.parametrize("alias", ["grpo", "ppo"])
def test_grpo_and_ppo_mean_clip(
    alias: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(f"train --method {alias} --steps 2 --dry-run", monkeypatch, capsys)
    assert done.code == 0
    assert "clip (GRPO, PPO): ratio in [0.8, 1.2]" in " ".join(done.out.split())
    assert resolve([{"bounds": {"method": alias, "eps_high": 0.3}}]).bounds == ClipSettings(eps_high=0.3)
    merged = resolve([{"bounds": {"method": "clip", "eps_high": 0.3}}, {"bounds": {"method": alias}}])
    assert merged.bounds == ClipSettings(eps_high=0.3)


def test_lr_and_max_tokens_are_flags(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run("train --lr 3e-6 --max-tokens 7 --dry-run", monkeypatch, capsys)
    assert done.code == 0
    assert "lr: 3.0e-06" in done.out
    assert "max_tokens: 7\n" in done.out
    planned = []
    monkeypatch.setattr(sweep_module, "_dry_run", lambda request, *_: planned.append(request))
    run("sweep --lr 1e-5,1e-6 --max-tokens 6,8 --steps 2 --dry-run", monkeypatch, capsys)
    runs = {(run.config.optim.lr, run.config.sampling.max_tokens) for run in planned[0].runs}
    assert runs == {(1e-5, 6), (1e-5, 8), (1e-6, 6), (1e-6, 8)}


def test_suggested_settings_exist() -> None:
    """Of all methods and with LoRA: a suggestion may be a setting of one method only."""
    lora = {"model": {"lora": {"rank": 8}}}
    keys = {
        key
        for method in METHODS
        for key in flatten(resolve([{"bounds": {"method": method}}, lora]).model_dump(), keep_empty=True)
    }
    assert set(SETTINGS_ELSEWHERE.values()) <= keys


@pytest.mark.parametrize("name", ["paper/base", "paper/base.yaml", "configs/paper/base.yaml"])
def test_shipped_configs_are_found_by_name(name: str, folder: Path) -> None:
    assert find_config(Path(name), "--config") == shipped_configs()["paper/base"]


def test_a_file_of_the_user_comes_before_a_shipped_one(folder: Path) -> None:
    (folder / "gsm8k").write_text("steps: 1\n")
    assert find_config(Path("gsm8k"), "--config") == Path("gsm8k")
    with pytest.raises(ConfigError):
        find_config(Path("nosuch"), "--config")


def test_shipped_configs_are_those_of_the_repository() -> None:
    configs = Path(__file__).parents[2] / "configs"
    assert sorted(shipped_configs()) == sorted(
        path.relative_to(configs).with_suffix("").as_posix() for path in configs.rglob("*.yaml")
    )


def test_configs_are_listed_and_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    listed = run("configs", monkeypatch, capsys).out
    for name, path in shipped_configs().items():
        assert f"{name} " in listed
        assert describe_config(path)[:60] in listed
    shown = run("configs show methods/band-tv", monkeypatch, capsys).out
    assert shown == shipped_configs()["methods/band-tv"].read_text()
    assert resolve([{"bounds": {"method": "band", "divergence": "tv"}}]).bounds == BandSettings(
        divergence="tv"
    )
