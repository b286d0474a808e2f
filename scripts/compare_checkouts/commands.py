"""The fixed list of commands that both checkouts run, in this order."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Stdout(Enum):
    """Comparison of what a command prints to standard output."""

    NONE = "not compared: wording, or durations"
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


def _parse(text: str, **values: Any) -> Iterator[Command]:
    """Yield the commands of lines `name: words` or `name < needed, needed: words`; a line ends without a backslash."""
    for line in text.strip().replace("\\\n", " ").splitlines():
        name, needs, words = re.fullmatch(r"(\S+?)(?: < (.*?))?: (.*)", line).groups(default="")  # type: ignore[union-attr]
        yield Command(
            name, tuple(shlex.split(words)), needs=tuple(needs.split(", ")) if needs else (), **values
        )


# Learning rate and radii are such that some tokens are clipped within these few steps.
_WRITING = """
train-kl: train -c small.yaml -c rich.yaml --method band --divergence kl --delta 0.001 --seed 1 --steps 4 --name kl \
    --mlflow --set bounds.max_ratio=5
train-clip: train -c small.yaml -c clip.yaml --method clip --seed 2 --steps 3 --name clip
train-tv-relaxed: train -c small.yaml -c relaxed.yaml --divergence tv --delta 0.01 --seed 3 --steps 3 --name tv
train-file: train -c small.yaml -c file.yaml --method clip-higher --seed 4 --steps 3 --name file \
    --set reward.wrong=-0.5 --set optim.lr=1e-2
train-not-finite: train -c small.yaml --seed 5 --steps 4 --name broken \
    --set optim.lr=1e30 --set optim.max_skips=2 --set optim.warmup_steps=0
train-killed: train -c small.yaml --divergence js --delta 0.001 --seed 6 --steps 6 --name killed \
    --set checkpoint.keep_last=null
train-resume < train-killed: train --resume killed
train-further < train-resume: train --resume killed --steps 7
eval-run < train-kl: eval --model kl@2 --name eval-run --no-mlflow
eval-file: eval --model model --task heldout.jsonl --task problems.jsonl --n 4 --max-tokens 6 --limit 8 --no-mlflow \
    --name eval-file --grader math --set sampling.max_prompt_tokens=52 --set grading.workers=1 \
    --set grading.deadline=60 --set evaluation.batch=8
eval-again < eval-file: eval --resume eval-file --no-mlflow
sweep < train-kl: sweep sweep.yaml -c small.yaml --steps 2 --jobs 2 --name sweep --set checkpoint.every=0
sync < train-clip, train-kl: sync clip
bounds-plot: bounds -d kl,tv --compare clip --plot bands.png
"""
"""Commands that write files."""

_KILLED: dict[str, Any] = {"code": -9, "kill_after": ("killed", 3)}
_DIFFERENT: dict[str, dict[str, Any]] = {"train-not-finite": {"code": 1}, "train-killed": _KILLED}

_JSON_WRITING = """
eval-rescore-step < train-kl: eval --samples runs/kl/samples/step-000003.parquet --name rescored-step --no-mlflow \
    --format json
report-json < sweep: report sweep --format json
report-runs < train-kl, train-clip, train-tv-relaxed: report runs/kl runs/clip runs/tv \
    --by bounds.method,optim.schedule --out report --format json
"""

_BYTES_WRITING = """
eval-json < train-clip: eval --model clip@3 --n 8 --k 1,2,8 --limit 6 --seed 9 --name eval-json \
    --no-mlflow --format json
eval-rescore-math: eval --samples stored.jsonl --grader math --name rescored-math --no-mlflow --format json \
    --set grading.workers=1 --set grading.deadline=60
"""

_NUMBERS = """
eval-compare < train-kl: eval compare kl@0 kl@4 --show 3
bounds-table: bounds 0.001 0.08 0.9 -d kl --compare clip
dry-resume < train-further: train --resume killed --steps 9 --dry-run
"""

_BYTES = """
eval-compare-json < eval-again: eval compare eval-file eval-file --format json
bounds-json: bounds 0.001 0.01 0.1 0.5 0.999 1 -d kl,reverse-kl,tv,chi2,neyman,hellinger,le-cam,js --delta 0.01 \
    --delta 0.3 --compare clip,clip-higher,dcpo,none --format json
bounds-csv: bounds 1e-9 0.08 0.9 -d kl -d js --max-ratio 10 --format csv
bounds-match: bounds --match clip-higher --at 0.1 -d kl,tv,chi2,hellinger --format json
bounds-match-csv: bounds --match clip --at 0.95 --format csv
help-version: --version
"""

_SETTINGS = """
dry-train: train --dry-run --all-settings
dry-file: train -c small.yaml -c file.yaml --dry-run --all-settings
"""

_HELP = """
help-root: --help
help-train: train --help
help-eval: eval --help
help-eval-compare: eval compare --help
help-sweep: sweep --help
help-report: report --help
help-sync: sync --help
help-bounds: bounds --help
"""

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
report sweep --baseline no-such-variant
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


def _all() -> Iterator[Command]:
    for command in _parse(_WRITING):
        yield replace(command, **_DIFFERENT.get(command.name, {}))
    yield from _parse(_JSON_WRITING, stdout=Stdout.JSON)
    yield from _parse(_BYTES_WRITING, stdout=Stdout.BYTES)
    yield from _parse(_NUMBERS, stdout=Stdout.NUMBERS, writes=False)
    yield from _parse(_BYTES, stdout=Stdout.BYTES, writes=False)
    yield from _parse(_SETTINGS, stdout=Stdout.SETTINGS, writes=False)
    yield from _parse(
        "dry-sweep: sweep -c small.yaml --delta 0.1,0.2 --seeds 0,1 --steps 2 --dry-run", writes=False
    )
    yield from _parse(_HELP, writes=False)
    wrong = enumerate(_WRONG_LINES.strip().splitlines(), start=1)
    lines = "\n".join(f"wrong-{number:02d}: {line}" for number, line in wrong)
    mistake: dict[str, Any] = {"code": 2, "writes": False}
    yield Command("help-none", (), **mistake)
    yield from (replace(command, needs=_RUNS) for command in _parse(lines, **mistake))


COMMANDS: tuple[Command, ...] = tuple(_all())


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
        wanted += [need for need in by_name[name].needs if need not in wanted]
    return [command for command in COMMANDS if command.name in wanted]
