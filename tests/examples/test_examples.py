"""The programs in examples/ run, and their results are those of their descriptions."""

import importlib
import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bandpo_cli.bounds import band_bounds
from bandpo_cli.callbacks import StepReport
from bandpo_cli.config.layers import read_config, resolve
from bandpo_cli.exports.verl_settings import differences_of, is_runnable
from bandpo_cli.grading.tools import tool_schemas
from bandpo_cli.metric_names import FLOPS
from bandpo_cli.storage.run_folder import RunFolder
from examples import calculator, custom_grader, grpo_loop, guess_number, plot_two_runs, python_api, sums
from tests.cli.eval_command import bandpo, succeed
from tests.cli.processes import end_of
from tests.cli.train_runs import SMALL, record
from tests.commands import Forked
from tests.tasks.stored_completions import jsonl

ROOT = Path(__file__).resolve().parents[2]


def test_the_plain_loop_is_short_and_rewards_sums_of_all_numbers():
    assert len((ROOT / "examples" / "grpo_loop.py").read_text().splitlines()) <= 80
    expected = {"2+3+4": 1.0, "4+3+2": 1.0, "9": 0.0, "2+3+3": 0.0, "2+7": 0.0, "": 0.0}
    assert {answer: grpo_loop.reward("2 3 4=9:", answer) for answer in expected} == expected


@pytest.mark.slow
def test_the_plain_loop_trains(capsys, one_thread, monkeypatch):
    monkeypatch.setattr(grpo_loop, "UPDATES", 1)
    history = grpo_loop.train(steps=2)
    assert len(history) == 2
    assert max(history) > 0
    assert capsys.readouterr().out.count("reward") == 2


def test_the_custom_divergence_is_twice_hellinger():
    """4(1 − √u) + 2(u − 1) = 2(√u − 1)², so its Band at δ is Hellinger's at δ/2."""
    logprobs = np.log([0.001, 0.1, 0.5, 0.9])
    custom = band_bounds(logprobs, "examples.custom_divergence:alpha_half", delta=0.05)
    hellinger = band_bounds(logprobs, "hellinger", delta=0.025)
    np.testing.assert_allclose(custom.lower, hellinger.lower, rtol=1e-6)
    np.testing.assert_allclose(custom.upper, hellinger.upper, rtol=1e-6)


@pytest.mark.slow
def test_the_custom_grader_and_its_data_work_in_the_command(tmp_path):
    problems = custom_grader.write_problems(tmp_path / "words.jsonl")
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    texts = [rows[0]["answer"], rows[1]["answer"][:2] + "zzz", "?"]
    stored = tmp_path / "answers.jsonl"
    jsonl(stored, *({**row, "completions": [text]} for row, text in zip(rows[:3], texts, strict=True)))
    flags = ["--grader", "examples.custom_grader:reversed_word", "--format", "json", "--no-mlflow"]
    done = succeed("eval", "--samples", stored, *flags, "--runs-dir", tmp_path / "runs", cwd=ROOT)
    assert "failed" not in done.err
    (scores,) = json.loads(done.out)["sets"].values()
    assert scores["metrics"]["mean_at_1"]["value"] == pytest.approx(1 / 3)
    half = {"score": 0.5, "correct": False, "verdict": "wrong"}
    assert custom_grader.reversed_word("dnab", "dnab", {"letters": 4})["score"] == 1.0
    assert custom_grader.reversed_word("dnxx", "dnab", {"letters": 4}) == half


def test_the_sums_are_distinct_and_their_answers_right():
    rows = sums.problems()
    assert len({row["question"] for row in rows}) == len(rows) == 31 * 8 * 8
    for row in rows:
        a, plus, b, minus, c = row["question"].split()
        assert (plus, minus, row["answer"]) == ("+", "-", str(int(a) + int(b) - int(c)))


def test_the_callback_in_the_docs_ignores_the_evaluation_before_training(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "python_api.md").read_text()
    code = next(block for block in page.split("```python\n") if "class PrintAccuracy" in block)
    (tmp_path / "printing_callback.py").write_text(code.partition("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    callback = importlib.import_module("printing_callback").PrintAccuracy()
    callback.step(StepReport(0, {"step": 0, "eval/countdown/pass_at_1": 0.5}, None))
    callback.step(StepReport(1, {"step": 1, "train/accuracy": 0.25}, None))
    assert capsys.readouterr().out == "1 0.25\n"


@pytest.mark.slow
def test_the_python_api_trains_resumes_and_compares(tmp_path, capsys, monkeypatch):
    few_problems = {"task": {"max_number": 5}}
    monkeypatch.setattr(python_api, "resolve", lambda layers: resolve([*layers, few_problems]))
    change = python_api.main(tmp_path, steps=1)
    out = capsys.readouterr().out
    assert [line[:8] for line in out.splitlines() if line.startswith("step")] == ["step   1", "step   2"]
    assert abs(change) < 0.5
    assert json.loads((tmp_path / "demo" / "summary.json").read_text())["status"] == "FINISHED"


@pytest.mark.slow
def test_two_runs_are_plotted_side_by_side_from_their_files(tmp_path):
    for name, scale in (("a", 1.0), ("b", 0.5)):
        folder = RunFolder.create(tmp_path, name)
        folder.write_config("seed: 1\n")
        for step in (1, 2, 3):
            values = dict.fromkeys(plot_two_runs.LABELS, scale * step / 4)
            folder.append_metrics({"step": step, **values})
        interval = {"value": scale / 2, "low": scale / 4, "high": scale}
        scores = {"problems": 2, "completions": 4, "metrics": {"mean_at_2": interval, "pass_at_2": interval}}
        folder.write_eval(2, {"step": 2, "sets": {"countdown": scores}})
    figure = plot_two_runs.plot(["a", "b"], tmp_path, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    columns = [figure.axes[0::2], figure.axes[1::2]]
    for (title, scale), axes in zip((("a", 1.0), ("b", 0.5)), columns, strict=True):
        assert axes[0].get_title() == title
        curves = [[*map(tuple, line.get_xydata())] for axis in axes for line in axis.lines]
        training = [(step, scale * step / 4) for step in (1, 2, 3)]
        assert curves == [training, [(2, scale / 2)], training, training]
        assert axes[0].get_ylim() == columns[0][0].get_ylim()


CUSTOM = """
bounds: {method: custom_loss:SmoothGate, options: {width: 0.3}}
objective: {advantages: custom_advantages:median_advantages}
task: {max_number: 5}
"""
WATCH = """from bandpo_cli.callbacks import CallbackBase

class Watch(CallbackBase):
    def step(self, report):
        print("watched", report.step)

class Broken(CallbackBase):
    def start(self, info):
        info.no_such_attribute
"""


@pytest.mark.slow
def test_custom_code_beside_a_config_file_is_resumed_elsewhere_and_runs_on_two_ranks(tmp_path):
    """A resume from another folder uses the copies of the run folder, not the files that have changed since."""
    code, elsewhere, runs = (tmp_path / name for name in ("code", "elsewhere", "runs"))
    code.mkdir()
    elsewhere.mkdir()
    for name in ("custom_loss.py", "custom_advantages.py"):
        shutil.copy(ROOT / "examples" / name, code)
    (code / "run.yaml").write_text(CUSTOM)
    (code / "watching.py").write_text(WATCH)
    start = ("train", "-c", "code/run.yaml", *SMALL, "--steps")
    succeed(*start, "4", "--name", "complete", cwd=tmp_path)
    done = succeed(*start, "2", "--name", "stopped", "--callback", "watching:Watch", cwd=tmp_path)
    assert "watched 2" in done.out
    copies = {path.name for path in (runs / "stopped").glob("*.py")}
    assert copies == {"custom_advantages.py", "custom_loss.py", "watching.py"}
    failed = bandpo(*start, "2", "--callback", "watching:Broken", cwd=tmp_path)
    assert failed.err.splitlines()[-1].endswith("no_such_attribute' (code/watching.py:9, in start)")
    assert (failed.code, "Traceback" in failed.err) == (1, False)
    (code / "custom_advantages.py").unlink()
    (elsewhere / "custom_loss.py").write_text("raise SystemExit('the file of another run')\n")
    done = succeed("train", "--resume", runs / "stopped", "--steps", "4", cwd=elsewhere)
    assert "elsewhere/custom_loss.py differs from the copy" in " ".join(done.out.split())
    assert "watched 4" in done.out
    assert record(runs / "stopped") == record(runs / "complete")
    shown = succeed("show", "stopped", cwd=tmp_path).out
    assert "custom: custom_loss:SmoothGate, width = 0.3" in shown

    again = ("train", "-c", "runs/stopped/config.yaml", "--name", "ranks", "--nproc", "2")
    end_of(Forked(*again, cwd=tmp_path, fork_children=True, OMP_NUM_THREADS="1"))
    for ours, theirs in zip(record(runs / "ranks"), record(runs / "complete"), strict=True):
        # A prompt whose completions two ranks have goes through the model twice.
        assert ours == pytest.approx(theirs | {FLOPS: ours[FLOPS]}, rel=1e-3, abs=1e-5)


def test_the_example_for_verl_exports_both_variants(tmp_path):
    """The commands of its run.sh, with programs in place of bandpo and of the exported scripts, and their settings."""
    program = tmp_path / "bin" / "bandpo"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        'for last in "$@"; do [ "$previous" = --out ] && out=$last; previous=$last; done\n'
        'mkdir -p "$out"; echo "$@" > "$out/words"; echo "echo ran \\$@ > $out/ran" > "$out/run.sh"\n'
    )
    program.chmod(0o755)
    subprocess.run(
        ["bash", ROOT / "examples" / "verl_band" / "run.sh", "a=b"],
        env={"PATH": f"{program.parent}:/usr/bin:/bin", "GPUS": "2"}, cwd=tmp_path, check=True,
    )  # fmt: skip
    for variant in ("band-kl", "clip"):
        folder = tmp_path / "verl-jobs" / variant
        assert (folder / "ran").read_text() == "ran a=b\n"
        words = (folder / "words").read_text().split()
        assert words[-4:] == ["--nodes", "1", "--gpus-per-node", "2"]
        layers = [read_config(Path(name)) for flag, name in pairwise(words) if flag == "-c"]
        config = resolve(layers)
        assert config.bounds.method == variant.partition("-")[0]
        assert (differences_of(config), is_runnable(config)) == ([], True)


def test_the_environment_answers_higher_and_lower():
    problem = {"question": "Game 1", "answer": "10", "seed": 3}
    game = guess_number.GuessNumber()
    assert game.reset(problem) == ["Guess my number from 1 to 10. Answer with a number only."]
    number = game.number
    assert game.step({"content": "I do not know"}) == ["Answer with a number only."]
    assert game.step({"content": f"{number + 1}"}) == ["lower"]
    assert game.step({"content": f"{number - 1}."}) == ["higher"]
    assert game.step({"content": f"It is {number}"}) is None
    assert game.reward == 1 / 4
    again = guess_number.GuessNumber()
    again.reset(problem)
    assert again.number == number


@pytest.mark.slow
def test_calculator_is_a_tool_and_computes_nothing_but_arithmetic():
    (schema,) = tool_schemas(("examples.calculator:calculate",), of_environment=False)
    assert schema["function"]["parameters"]["required"] == ["expression"]
    assert [calculator.calculate(text) for text in ("(12 + 3) * 4", "1/3", "-2*3.5")] == [60, 0.333333, -7]
    for text in ("2**9", "abs(3)", "x", "'a'*3"):
        with pytest.raises(ValueError, match="only numbers"):
            calculator.calculate(text)
