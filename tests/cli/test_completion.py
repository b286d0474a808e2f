"""Shell completion: the environment variables of a shell in, the values that it offers out."""

import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from bandpo_cli import __version__
from bandpo_cli.__main__ import main
from bandpo_cli.config import shipped_configs
from tests.cli.eval_command import succeed


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder: two runs, an evaluation and a sweep of one run, and files of settings."""
    for name in (
        "runs/first/config.yaml", "runs/second/config.yaml", "runs/scores/eval.json", "runs/deltas/sweep.yaml",
        "runs/deltas/kl-s0/config.yaml", "other/elsewhere/config.yaml", "mine.yaml", "notes.txt", "settings/fast.yaml",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(shell: str, *words: str) -> dict[str, str]:
    """Return the variables with which a shell asks for completions of the last word."""
    shared = {"_BANDPO_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    line = ["bandpo", *words]
    if shell == "bash":
        return {**shared, "COMP_WORDS": "\n".join(line), "COMP_CWORD": str(len(words))}
    return {**shared, "_TYPER_COMPLETE_ARGS": " ".join(line)}


def complete(capfd: pytest.CaptureFixture[str], shell: str, *words: str) -> str:
    """Return what `bandpo` prints for a shell. It must succeed, and print no error."""
    with (
        mock.patch.dict(os.environ, environment(shell, *words)),
        mock.patch.object(sys, "argv", ["bandpo"]),
        pytest.raises(SystemExit) as end,
    ):
        main()
    out, err = capfd.readouterr()
    assert (end.value.code, err) == (0, "")
    return out


CONFIGS = list(shipped_configs())
TASKS_LIKE_A = ["aime24", "aime25", "aime26", "amc23"]
RUNS = ["deltas/kl-s0", "first", "second"]

VALUES: dict[str, list[str]] = {
    "tr": ["train"],
    "eval co": ["compare"],
    "--vers": ["--version"],
    "train --met": ["--method"],
    "train --method cl": ["clip", "clip-cov", "clip-higher"],
    "train --task a": TASKS_LIKE_A,
    "train --task r": ["reasoning-gym:list"],
    "train -c ": ["mine.yaml", *CONFIGS],
    "train --config paper/d": ["paper/dapo", "paper/dynamic-sampling"],
    "train --resume ": RUNS,
    "train --resume --runs-dir": ["--runs-dir"],
    "sweep --method band,cl": ["band,clip", "band,clip-cov", "band,clip-higher"],
    "sweep --divergence tv,kl,t": [],  # tv is given already
    "sweep --resume ": ["deltas"],
    "eval --grader mat": ["math", "math-dapo", "math-dapo-boxed"],
    "eval --resume ": ["scores"],
    "eval compare scores f": ["first"],
    "report ": ["deltas", *RUNS],
    "runs d": ["deltas", "deltas/kl-s0"],
    "runs --status k": ["killed"],
    "show --format ": ["table", "json"],
    "sync first s": ["second"],
    "export verl -c methods/clip-h": ["methods/clip-higher"],
    "import verl --run": ["--run", "--runs-dir"],
    "bounds -d kl,hel": ["kl,hellinger"],
    "configs show sweeps/r": ["sweeps/radius", "sweeps/rare-tokens-pilot", "sweeps/rare-tokens"],
    # the shell then completes file names
    "train --model ": [],
    "train -c no": [],
    # mistakes earlier in the line, and options that would print and exit
    "trian --met": [],
    "train --delta x,y --method dc": ["dcpo"],
    "train --task reasoning-gym:list --method dc": ["dcpo"],
    "--version tr": ["train"],
    "show --runs-dir nosuch ": [],
}
"""The words after `bandpo`, the last one incomplete, and the values that complete it."""


@pytest.mark.parametrize("line", VALUES)
def test_values_are_offered(line, place, capfd):
    offered = complete(capfd, "bash", *line.split(" ")).split()
    assert sorted(offered) == sorted(VALUES[line])


def test_zsh_and_fish_get_values_with_descriptions(place, capfd):
    """The output for zsh is a command that it evaluates."""
    out = complete(capfd, "zsh", "train", "--method", "cl")
    assert out.startswith("_arguments '*: :((")
    assert '"clip":"the same fixed interval for every token (PPO, GRPO)"' in out
    assert '"clip-higher":' in out
    assert '"band"' not in out
    assert complete(capfd, "zsh", "train", "--model", "").strip() == "_files"
    lines = complete(capfd, "fish", "show", "").splitlines()
    assert lines == ["deltas/kl-s0\trun", "first\trun", "second\trun"]


@pytest.mark.parametrize("variables", [{}, {"COMP_WORDS": "bandpo train", "COMP_CWORD": "x"}])
def test_a_malformed_request_prints_nothing(variables, place, capfd):
    with (
        mock.patch.dict(os.environ, {"_BANDPO_COMPLETE": "complete_bash", **variables}),
        pytest.raises(SystemExit),
    ):
        main()
    out, err = capfd.readouterr()
    assert (out.strip(), err) == ("", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_for_the_command_bandpo(shell, monkeypatch, capfd):
    """Also if it is printed by `python -m bandpo_cli`."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bandpo_cli/__main__.py", "--show-completion"])
    monkeypatch.setattr("typer._completion_shared.shellingham.detect_shell", lambda: (shell, shell))
    with pytest.raises(SystemExit) as end:
        main()
    out = capfd.readouterr().out
    assert end.value.code == 0
    assert f"_BANDPO_COMPLETE=complete_{shell}" in out
    assert "python -m" not in out


def test_the_version_names_the_commit_of_a_checkout_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("bandpo_cli.__main__.__file__", str(tmp_path / "bandpo_cli" / "__main__.py"))
    state = {"commit": "0746989" + 33 * "f", "dirty": True}
    monkeypatch.setattr("bandpo_cli.storage.run_record.git_state", lambda folder: state)
    commit = " (commit 0746989"
    for dirty, text in ((True, ""), (True, f"{commit}, with local changes)"), (False, f"{commit})")):
        state["dirty"] = dirty
        assert succeed("--version", cwd=tmp_path).out == f"bandpo {__version__}{text}\n"
        (tmp_path / ".git").touch()


def test_the_help_of_train_has_a_panel_per_group_in_100_columns(tmp_path):
    lines = succeed("train", "--help", cwd=tmp_path, COLUMNS="100").out.splitlines()
    panels = [line.split()[1] for line in lines if line.startswith("╭")]
    assert " ".join(panels) == "Options Execution Model Data Sampling Method Optimization Tracking"
    assert max(map(len, lines)) <= 100
    example = " bandpo train --config my.yaml --set optim.lr=1e-4  # a file, one change"
    assert example in map(str.rstrip, lines)
    assert len(lines) < 120, "the column of the texts is narrow"


def test_the_help_of_sweep_has_commas_where_values_are_compared(tmp_path):
    lines = succeed("sweep", "--help", cwd=tmp_path, COLUMNS="100").out.splitlines()
    rows = [line.split() for line in lines if line.startswith("│ --")]
    metavars = {row[1]: row[2] for row in rows if row[1] in ("--delta", "--model", "--sampler", "--lr")}
    assert metavars == {"--delta": "R,R", "--model": "M,M", "--lr": "R,R", "--sampler": "ENGINE"}


def test_installation_options_are_last(tmp_path):
    out = succeed("--help", cwd=tmp_path).out
    names = ("--version", "--help", "--install-completion", "--show-completion")
    assert [*names] == sorted(names, key=out.index)
