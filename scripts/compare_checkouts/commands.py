"""The fixed list of commands that both checkouts run, in this order."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Stdout(Enum):
    """Comparison of what a command prints to standard output."""

    NONE = "not compared: it contains durations"
    WORDS = "compared with --messages only"
    BYTES = "byte for byte"
    JSON = "as JSON, without the ignored keys"
    NUMBERS = "the numbers in it, in their order"
    SETTINGS = "the settings of a dry run, and the numbers after them"


@dataclass(frozen=True)
class Command:
    """A command line of `bandpo`, and what to compare.

    Attributes:
        name: names it in the table and for --only.
        words: the arguments of `bandpo`.
        code: the exit code that both checkouts must return; -9 for a killed process.
        stdout: comparison of standard output.
        writes: False if the command must leave every file as it is.
        needs: names of the commands that must run before.
        kill_after: `(run, step)`: send SIGKILL to the process group once the run has recorded the step.
    """

    name: str
    words: tuple[str, ...]
    code: int = 0
    stdout: Stdout = Stdout.NONE
    writes: bool = True
    needs: tuple[str, ...] = ()
    kill_after: tuple[str, int] | None = None


def _command(name: str, line: str, **options: object) -> Command:
    return Command(name, tuple(shlex.split(line)), **options)  # type: ignore[arg-type]


def _set(*assignments: str) -> str:
    return " ".join(f"--set {each}" for each in assignments)


# Learning rate and radii are such that some tokens are clipped within these few steps.
_TRAIN = [
    _command(
        "train-kl",
        "train -c small.yaml -c rich.yaml --method band --divergence kl --delta 0.001 --seed 1 --steps 4 --name kl "
        "--mlflow " + _set("bounds.max_ratio=5"),
    ),
    _command(
        "train-clip",
        "train -c small.yaml --method clip --seed 2 --steps 3 --name clip "
        + _set(
            "bounds.eps_low=0.05",
            "bounds.eps_high=0.05",
            "objective.aggregation=token-mean",
            "objective.advantage_std=false",
            "objective.dual_clip=null",
            "optim.schedule=linear",
            "checkpoint.keep_last=null",
            "sampling.max_sequences=10",
            "evaluation.batch=8",
        ),
    ),
    _command(
        "train-tv-relaxed",
        "train -c small.yaml --divergence tv --delta 0.01 --seed 3 --steps 3 --name tv "
        + _set(
            "bounds.relax.eps_low=0.02",
            "bounds.relax.eps_high=0.03",
            "bounds.max_ratio=null",
            "objective.aggregation=seq-sum-norm",
            "objective.old_logprobs=sampler",
            "model.gradient_checkpointing=true",
            "model.dtype=bfloat16",
        ),
    ),
    _command(
        "train-file",
        "train -c small.yaml -c file.yaml --method clip-higher --seed 4 --steps 3 --name file "
        + _set("reward.wrong=-0.5", "optim.lr=1e-2"),
    ),
    _command(
        "train-not-finite",
        "train -c small.yaml --seed 5 --steps 4 --name broken "
        + _set("optim.lr=1e30", "optim.max_skips=2", "optim.warmup_steps=0"),
        code=1,
    ),
    _command(
        "train-killed",
        "train -c small.yaml --divergence js --delta 0.001 --seed 6 --steps 6 --name killed "
        + _set("checkpoint.keep_last=null"),
        code=-9,
        kill_after=("killed", 3),
    ),
    _command("train-resume", "train --resume killed", needs=("train-killed",)),
    _command("train-further", "train --resume killed --steps 7", needs=("train-resume",)),
]

_EVAL = [
    _command("eval-run", "eval --model kl@2 --name eval-run --no-mlflow", needs=("train-kl",)),
    _command(
        "eval-json",
        "eval --model clip@3 --n 8 --k 1,2,8 --limit 6 --seed 9 --legacy-best-at-k --name eval-json --no-mlflow "
        "--format json",
        stdout=Stdout.BYTES,
        needs=("train-clip",),
    ),
    _command(
        "eval-file",
        "eval --model model --task heldout.jsonl --task problems.jsonl --n 4 --max-tokens 6 --limit 8 --no-mlflow "
        "--name eval-file --grader math "
        + _set(
            "sampling.max_prompt_tokens=40", "grading.workers=1", "grading.deadline=60", "evaluation.batch=8"
        ),
    ),
    _command("eval-again", "eval --resume eval-file --no-mlflow", needs=("eval-file",)),
    _command(
        "eval-rescore-step",
        "eval --samples runs/kl/samples/step-000003.parquet --name rescored-step --no-mlflow --format json",
        stdout=Stdout.JSON,
        needs=("train-kl",),
    ),
    _command(
        "eval-rescore-math",
        "eval --samples stored.jsonl --grader math --name rescored-math --no-mlflow --format json "
        + _set("grading.workers=1", "grading.deadline=60"),
        stdout=Stdout.BYTES,
    ),
    _command(
        "eval-compare",
        "eval compare kl@0 kl@4 --show 3",
        stdout=Stdout.NUMBERS,
        writes=False,
        needs=("train-kl",),
    ),
    _command(
        "eval-compare-json",
        "eval compare eval-file eval-file --format json",
        stdout=Stdout.BYTES,
        writes=False,
        needs=("eval-again",),
    ),
]

_MANY_RUNS = [
    _command(
        "sweep",
        "sweep sweep.yaml -c small.yaml --steps 2 --jobs 2 --name sweep " + _set("checkpoint.every=0"),
        needs=("train-kl",),
    ),
    _command("report-json", "report sweep --format json", stdout=Stdout.JSON, needs=("sweep",)),
    _command(
        "report-runs",
        "report runs/kl runs/clip runs/tv --by bounds.method,optim.schedule --out report --format json",
        stdout=Stdout.JSON,
        needs=("train-kl", "train-clip", "train-tv-relaxed"),
    ),
    _command("sync", "sync clip", needs=("train-clip", "train-kl")),
]

_BOUNDS = [
    _command(
        "bounds-json",
        "bounds -f probabilities.txt -d kl,reverse-kl,tv,chi2,neyman,hellinger,le-cam,js --delta 0.01 --delta 0.3 "
        "--compare clip,clip-higher,dcpo,none --format json",
        stdout=Stdout.BYTES,
        writes=False,
    ),
    _command(
        "bounds-csv",
        "bounds 1e-9 0.08 0.9 -d kl -d js --max-ratio 10 --format csv",
        stdout=Stdout.BYTES,
        writes=False,
    ),
    _command(
        "bounds-table",
        "bounds 0.001 0.08 0.9 -d kl --compare clip",
        stdout=Stdout.NUMBERS,
        writes=False,
    ),
    _command(
        "bounds-match",
        "bounds --match clip-higher --at 0.1 -d kl,tv,chi2,hellinger --format json",
        stdout=Stdout.BYTES,
        writes=False,
    ),
    _command(
        "bounds-match-csv", "bounds --match clip --at 0.95 --format csv", stdout=Stdout.BYTES, writes=False
    ),
    _command("bounds-plot", "bounds -d kl,tv --compare clip --plot bands.png"),
]

_DRY = [
    _command("dry-train", "train --dry-run", stdout=Stdout.SETTINGS, writes=False),
    _command("dry-file", "train -c small.yaml -c file.yaml --dry-run", stdout=Stdout.SETTINGS, writes=False),
    _command(
        "dry-resume",
        "train --resume killed --steps 9 --dry-run",
        stdout=Stdout.NUMBERS,
        writes=False,
        needs=("train-further",),
    ),
    _command(
        "dry-sweep",
        "sweep -c small.yaml --delta 0.1,0.2 --seeds 0,1 --steps 2 --dry-run",
        stdout=Stdout.NONE,
        writes=False,
    ),
]

_HELP = [
    _command(f"help-{name.replace(' ', '-') or 'root'}", f"{name} --help", stdout=Stdout.WORDS, writes=False)
    for name in ("", "train", "eval", "eval compare", "sweep", "report", "sync", "bounds")
] + [
    _command("help-version", "--version", stdout=Stdout.BYTES, writes=False),
    _command("help-none", "", code=2, stdout=Stdout.WORDS, writes=False),
]

_WRONG_LINES = """
unknown-command
train --no-such-flag
train --method bnad
train --divergence klx
train --divergence no_such_module:f
train --delta -1
train --delta nan
train --delta abc
train --steps 0
train --seed -1
train --sampler vlm
train --set optim.lrr=1
train --set nonsense
train --set optim.lr=fast
train --set optim.updates=3
train --set evaluation.samples=4 --set evaluation.k=[8]
train --set sampling.top_p=0.9
train --set reward.correct=-1
train --set sampling=3 --set sampling.prompts=4
train --set tracking.uri=http://me:secret@host/
train -c no-such-file.yaml
train -c broken.yaml
train -c twice.yaml
train -c list.yaml
train --model ./no-such-model
train --model empty
train --task no-such-task
train --task no-such-file.jsonl
train --task torn.jsonl --model model
train --task unanswered.jsonl --model model
train --task problems.jsonl
train --task problems.jsonl --model model --set task.grader=mth
train --name ../outside
train --name kl
train --resume no-such-run
train --resume kl
train --resume kl --name other
train --resume killed --seed 9
train --resume clip --steps 9
train --resume eval-run
eval --n 4 --k 8
eval --k 0
eval --temperature 0
eval --format yaml
eval --model kl@99
eval --model no-such-run@3
eval --task problems.jsonl
eval --samples no-such-file.jsonl
eval --samples problems.jsonl
eval --samples stored.jsonl --model kl
eval --samples stored.jsonl --k 4
eval --resume no-such-evaluation
eval --name eval-run
eval compare kl@1 kl@0
eval compare kl@0 no-such-evaluation
sweep --delta 0.1,0.1
sweep --delta 0.1,-1
sweep --divergence kl,tw
sweep --seeds 0,x
sweep --axis delta
sweep --delta 0.1,0.2 --baseline 0.3
sweep --jobs 0
sweep --stop-behind 2
sweep --executor slurm
sweep --delta match:clip
sweep axis.yaml
sweep no-such-file.yaml
sweep --resume no-such-sweep
report no-such-folder
report sweep --baseline no-such-arm
report sweep --by optim.lrr
report sweep --format csv
sync no-such-run
sync
bounds
bounds 1.5
bounds 0
bounds abc
bounds 0.1 --delta -1
bounds 0.1 --delta 0
bounds 0.1 -d klx
bounds 0.1 --max-ratio 0.5
bounds 0.1 --compare clp
bounds 0.1 --format yaml
bounds -f no-such-file.txt
bounds 0.1 --plot bands.xyz
bounds --match clip
bounds --match clip --at 1
bounds 0.1 --match clip --at 0.1
"""
"""Command lines with a mistake: exit code 2, no traceback, nothing written."""

_RUNS = ("train-kl", "train-clip", "train-further", "eval-run", "sweep")
"""What the mistakes refer to."""

_WRONG = [
    _command(f"wrong-{number:02d}", line, code=2, stdout=Stdout.WORDS, writes=False, needs=_RUNS)
    for number, line in enumerate(_WRONG_LINES.strip().splitlines(), start=1)
]

COMMANDS: tuple[Command, ...] = (*_TRAIN, *_EVAL, *_MANY_RUNS, *_BOUNDS, *_DRY, *_HELP, *_WRONG)


def choose(only: Sequence[str]) -> list[Command]:
    """Return the commands whose names start with one of `only`, and those that they need; all for an empty list.

    Raises ValueError for a word that no name starts with.
    """
    by_name = {command.name: command for command in COMMANDS}
    unknown = [word for word in only if not any(name.startswith(word) for name in by_name)]
    if unknown:
        raise ValueError(f"--only {unknown[0]}: no such command; the commands are {', '.join(by_name)}")
    wanted = [name for name in by_name if not only or name.startswith(tuple(only))]
    for name in wanted:  # grows while it is read
        wanted += [each for each in by_name[name].needs if each not in wanted]
    return [command for command in COMMANDS if command.name in wanted]
