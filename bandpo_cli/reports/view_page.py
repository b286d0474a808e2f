"""The page of `bandpo view`: content of runs and evaluations as JSON, with values per token as base64 arrays.

All text of completions reaches the page as JSON within a script element that is not executed, and without the
characters that end it; the script of the page makes text nodes of it. The content security policy of the page permits
its own script only, and files of parts.

A page whose data take more than `MAX_PAGE_BYTES` loads parts of some groups from the folder beside it when they are
scrolled to. A page opened from a disk may not read other files, so a part is a script that passes its data on.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from bandpo_cli.config.layers import read_layer
from bandpo_cli.errors import UserError, excerpt, plural
from bandpo_cli.metric_names import LABELS, STEP, Axis, has_nonbinary_rewards
from bandpo_cli.storage.files import replace_nonfinite, step_name, step_of, write_text
from bandpo_cli.storage.run_folder import RECORD_FILE, EvalFolder, RunFolder, find_folder, shell_command
from bandpo_cli.storage.run_record import completions_path
from bandpo_cli.storage.tables import TokenValues, read_graded_completions, read_token_values

FIXED_CLIP = 0.2
"""ε of the fixed interval [1 − ε, 1 + ε] that clipped tokens are compared with, as in PPO and GRPO."""

MAX_LISTED = 100
"""Largest number of tokens in a table of differences."""

ProblemKey = tuple[str, str]
"""The task or data set of a problem, and its id."""

MAX_PAGE_BYTES = 20_000_000
"""Largest size of a page in one file."""

_PART_TOKENS = 100_000
"""Approximate number of tokens of a part."""

_MAX_POINTS, _QUESTION_CHARS = 300, 160
"""Points of a curve, and characters of a question in the heading of its group."""

_CURVES = (
    "train/reward", "train/accuracy", "train/entropy", "clip/active_fraction", "ratio/max", "train/response_length",
)  # fmt: skip
"""Metrics with a curve."""


@dataclass(frozen=True)
class ViewSource:
    """The groups of a step of a run, or those of an evaluation, which has neither step nor values per token.

    Attributes:
        method: method, divergence and radius of the run, such as `band kl 0.05`; "" for an evaluation.
        completions: S completions; those of a group follow each other.
        metrics: the lines of `metrics.jsonl`, for the curves.
    """

    folder: Path
    step: int | None
    method: str
    completions: Sequence[Mapping[str, Any]]
    values: TokenValues | None
    metrics: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        """`first, step 20`, or the name of the evaluation."""
        return self.folder.name if self.step is None else f"{self.folder.name}, step {self.step}"

    @cached_property
    def groups(self) -> list[tuple[ProblemKey, range]]:
        """The problem and the completions of each group."""
        keys = [(completion["label"], completion["problem_id"]) for completion in self.completions]
        sizes = [(key, sum(1 for _ in members)) for key, members in groupby(keys)]
        ends = accumulate(size for _, size in sizes)
        return [(key, range(end - size, end)) for (key, size), end in zip(sizes, ends, strict=True)]

    @cached_property
    def token_starts(self) -> NDArray[np.int64]:
        """The first token of each completion, and the number of tokens."""
        assert self.values is not None
        return np.concatenate([[0], np.cumsum(self.values.lengths)])

    def select(self, keys: Sequence[ProblemKey]) -> Self:
        """Return the first group of each of these problems, in this order."""
        places = dict(reversed(self.groups))
        chosen = [index for key in keys for index in places[key]]
        completions, values = [self.completions[index] for index in chosen], self.values
        if values is not None:
            tokens = np.concatenate([np.arange(*self.token_starts[index : index + 2]) for index in chosen])
            changes: dict[str, Any] = {
                name: getattr(values, name)[tokens] for name in TokenValues._fields[3:]
            }
            changes |= {"lengths": values.lengths[chosen], "advantage": values.advantage[chosen]}
            values = values._replace(**changes)
        return replace(self, completions=completions, values=values)


def open_sources(names: Sequence[str], runs_dir: Path, step: int | None = None) -> list[ViewSource]:
    """Return the content of a page: one run or evaluation, or the common problems of two.

    Args:
        names: runs or evaluations: their names in `runs_dir`, or their folders.
        step: a recorded step of the runs; None for the last one, of two runs the last one that both have recorded.

    Raises:
        UserError: there is no such folder, the step is not recorded, the run has recorded no tokens, two sources share
            no problem, or a file is damaged.
    """
    recorded = [_recorded_steps(name, runs_dir, step) for name in names]
    steps = [set(of_run) for _, of_run in recorded if of_run is not None]
    if step is None and steps:
        common = set.intersection(*steps)
        if not common:
            listed = ", ".join(f"{folder.name} has {_listed(of_run or [])}" for folder, of_run in recorded)
            raise UserError(f"the runs have no recorded step in common: {listed}")
        step = max(common)
    sources = [_read_source(folder, None if of_run is None else step) for folder, of_run in recorded]
    if len(sources) == 1:
        return sources
    a, b = sources
    in_b = {key for key, _ in b.groups}
    keys = [key for key in dict.fromkeys(key for key, _ in a.groups) if key in in_b]
    if not keys:
        raise UserError(
            f"{a.name} and {b.name} share no problem; runs of the same task and seed share those of a step"
        )
    return [source.select(keys) for source in sources]


def _recorded_steps(name: str, runs_dir: Path, step: int | None) -> tuple[Path, list[int] | None]:
    """Return the folder that `name` means and the recorded steps of a run, None for an evaluation."""
    evaluation = find_folder(name, runs_dir, RECORD_FILE)
    if evaluation is not None:
        return completions_path(name, runs_dir, step).parent, None
    run = RunFolder.open(runs_dir, name).path
    steps = sorted(filter(None, map(step_of, (run / "token_values").glob("step-*.parquet"))))
    if not steps:
        raise UserError(
            f"{run} has no recorded tokens: tracking.tokens_every was 0, or no step is complete; "
            f"{shell_command('samples', run, runs_dir)} prints its completions"
        )
    if step is not None and step not in steps:
        raise UserError(f"--step {step}: its tokens are not recorded in {run}; recorded: {_listed(steps)}")
    return run, steps


def _listed(steps: Sequence[int]) -> str:
    """Return the steps, of many only the first two and the last eight."""
    texts = [*map(str, steps)]
    return ", ".join(texts if len(texts) <= 12 else [*texts[:2], "…", *texts[-8:]])


def _read_source(folder: Path, step: int | None) -> ViewSource:
    """Return all groups of a step of the run in `folder`, or of the evaluation where `step` is None."""
    if step is None:
        completions = read_graded_completions(EvalFolder(folder).samples_path)
        return ViewSource(folder, None, "", completions, None, [])
    file = f"{step_name(step)}.parquet"
    completions = read_graded_completions(folder / "samples" / file)
    values = read_token_values(folder / "token_values" / file)
    if values.lengths.tolist() != [completion["length"] for completion in completions]:
        raise UserError(f"{folder}: token_values/{file} and samples/{file} are not of the same completions")
    bounds = read_layer(folder / "config.yaml", "run settings").get("bounds", {})
    method = " ".join(str(bounds[key]) for key in ("method", "divergence", "delta") if key in bounds)
    metrics = RunFolder(folder).read_metrics()
    return ViewSource(folder, step, method, completions, values, metrics)


def fixed_clip_differences(values: TokenValues) -> dict[str, NDArray[Any]]:
    """Return the tokens that only one of the method and the fixed clip clips, as indices, the least probable first.

    `method`: the method clips the token, and the interval [0.8, 1.2] would not. `fixed`: the reverse. The fixed clip
    clips a ratio above the interval with a positive advantage, and one below it with a negative advantage.
    """
    advantages, ratios = np.repeat(values.advantage, values.lengths), values.ratio
    fixed = (advantages > 0) & (ratios > 1 + FIXED_CLIP) | (advantages < 0) & (ratios < 1 - FIXED_CLIP)
    fixed &= values.importance != 0
    clipped = values.clipped > 0
    found = {"method": np.flatnonzero(clipped & ~fixed), "fixed": np.flatnonzero(fixed & ~clipped)}
    return {name: tokens[np.argsort(values.old_logprob[tokens])] for name, tokens in found.items()}


def default_path(sources: Sequence[ViewSource]) -> Path:
    """Return the file of the page in the folder of the first source, such as `view/step-000020.html`."""
    first, *others = sources
    stem = "completions" if first.step is None else step_name(first.step)
    return first.folder / "view" / f"{'-with-'.join([stem, *(other.folder.name for other in others)])}.html"


def write_page(sources: Sequence[ViewSource], out: Path, axis: Axis = STEP) -> list[Path]:
    """Write the page of one or two sources with the same problems; return the page and its parts.

    Raises UserError if a file cannot be written, or a run does not have the metric of the x axis of the curves.
    """
    index, parts = page_data(sources, axis)
    folder = out.with_name(f"{out.stem}_parts")
    texts = [to_json(part) for part in parts]
    is_divided = sum(map(len, texts)) > MAX_PAGE_BYTES
    files = [folder / f"part-{number:04d}.js" for number in range(len(texts))] if is_divided else []
    index["files"] = [f"{folder.name}/{file.name}" for file in files]
    try:
        for old in folder.glob("part-*.js"):
            old.unlink()
        with suppress(OSError):  # it is missing, or has other files
            folder.rmdir()
        for number, (file, text) in enumerate(zip(files, texts, strict=False)):
            write_text(file, f"loadPart({number},{text});\n")
        write_text(out, render(sources, to_json(index), [] if is_divided else texts))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    return [out, *files]


def render(sources: Sequence[ViewSource], index: str, parts: Sequence[str]) -> str:
    """Return the HTML page with this data, which `to_json` has encoded."""
    loader = PackageLoader("bandpo_cli.reports")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    css, script = (str(environment.get_template(name).render()) for name in ("view.css", "view.js"))
    count = sum(len(source.completions) for source in sources)
    facts = [plural(len(sources[0].groups), "problem"), plural(count, "completion")]
    facts += ["curves: A solid, B dashed"] * (len(sources) > 1)
    return environment.get_template("view.html").render(
        title=" and ".join(source.name for source in sources),
        about=", ".join([*dict.fromkeys(source.method for source in sources if source.method), *facts]),
        css=Markup(css),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=[("data", Markup(index)), *((f"part-{i}", Markup(part)) for i, part in enumerate(parts))],
    )


def to_json(value: object) -> str:
    """Return JSON in ASCII that neither ends a script element nor begins a comment; NaN and infinities are null."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(
    sources: Sequence[ViewSource], axis: Axis = STEP
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the data of a page: what its tables and headings need, and the parts with texts and values per token."""
    groups: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    firsts: list[int] = []  # the first group of each part
    size = _PART_TOKENS
    for number, ((label, problem), _) in enumerate(sources[0].groups):
        if size >= _PART_TOKENS:
            firsts.append(number)
            parts.append({"prompts": [], "references": []})
            size = 0
        spans = [source.groups[number][1] for source in sources]
        sides = [[_completion(source, i) for i in span] for source, span in zip(sources, spans, strict=True)]
        first = sources[0].completions[spans[0][0]]
        groups.append(
            {
                "name": problem if problem.startswith(label) else f"{label} {problem}",
                "question": excerpt(first["question"], _QUESTION_CHARS),
                "part": len(parts) - 1,
                "sides": sides,
                "equal": [not _has_spread(side) for side in sides],
            }
        )
        parts[-1]["prompts"].append(first["prompt"])
        parts[-1]["references"].append(first["reference"])
        size += sum(completion["length"] for side in sides for completion in side)
    for part, (begin, end) in zip(parts, pairwise([*firsts, len(groups)]), strict=True):
        ends = [(source.groups[begin][1].start, source.groups[end - 1][1].stop) for source in sources]
        part["sides"] = [_part_of(source, *span) for source, span in zip(sources, ends, strict=True)]
    index = {"groups": groups, "sources": [_about(source, axis) for source in sources], "clip": FIXED_CLIP}
    index["axis"] = "steps" if axis == STEP else axis.label
    return index, parts


def _completion(source: ViewSource, index: int) -> dict[str, Any]:
    """Return a completion as the filters and its heading need it."""
    completion, values = source.completions[index], source.values
    about: dict[str, Any] = {
        "reward": completion["reward"],
        "correct": completion["accuracy"] == 1,
        "verdict": completion["verdict"],
        "truncated": completion["finish_reason"] == "length",
        "length": completion["length"] or 0,
        "advantage": None if values is None else float(values.advantage[index]),
    }
    return replace_nonfinite(about)  # type: ignore[return-value]


def _has_spread(side: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the rewards of a group differ by more than rounding."""
    rewards = [completion["reward"] for completion in side if completion["reward"] is not None]
    return len(rewards) > 1 and max(rewards) - min(rewards) > 1e-9 * max(map(abs, rewards))


def _about(source: ViewSource, axis: Axis) -> dict[str, Any]:
    """Return name, curves, texts of tokens, clipped tokens and differences from the fixed clip of a source."""
    amounts = axis.by_step(source.metrics, source.folder)
    about: dict[str, Any] = {
        "name": source.name,
        "method": source.method,
        "place": None if source.step is None else amounts.get(source.step),
        "curves": _curves(source.metrics, amounts),
    }
    if (values := source.values) is not None:
        clipped = np.flatnonzero(values.clipped)
        owners = np.searchsorted(source.token_starts, clipped, side="right") - 1
        lowest = np.zeros(len(values.lengths))
        np.minimum.at(lowest, owners, values.old_logprob[clipped])
        about |= {
            "texts": list(values.texts),
            "clipped": np.bincount(owners, minlength=len(lowest)).tolist(),
            "lowest": np.round(lowest, 3).tolist(),
            "tokens": int(source.token_starts[-1]),
            "differences": {
                name: {"count": len(tokens), "rows": _table(source, values, tokens[:MAX_LISTED])}
                for name, tokens in fixed_clip_differences(values).items()
            },
        }
    return about


def _table(source: ViewSource, values: TokenValues, tokens: NDArray[Any]) -> object:
    """Return a row per token: number of its completion, its number there, and the values of a table of differences."""
    owners = np.searchsorted(source.token_starts, tokens, side="right") - 1
    names = ("text_index", "old_logprob", "ratio", "lower", "upper")
    columns = [
        owners,
        tokens - source.token_starts[owners],
        *(getattr(values, name)[tokens] for name in names),
    ]
    columns.append(values.advantage[owners])
    return replace_nonfinite([*zip(*(column.tolist() for column in columns), strict=True)])


def _curves(metrics: Sequence[Mapping[str, Any]], amounts: Mapping[float, float]) -> list[dict[str, Any]]:
    """Return places and values of the metrics with a curve; `amounts` are the places by step."""
    keys = _CURVES if any(map(has_nonbinary_rewards, metrics)) else _CURVES[1:]
    curves = []
    for key in keys:
        points = [
            (amounts[line["step"]], line[key]) for line in metrics if isinstance(line.get(key), int | float)
        ]
        stride = -(-len(points) // _MAX_POINTS) or 1
        points = points[:: -stride or None][::-1]
        if points:
            places, values = zip(*points, strict=True)
            name = LABELS[key].name + (", nats" if LABELS[key].unit == "nats" else "")
            curves.append({"name": name, "places": places, "values": values})
    return curves


def _part_of(source: ViewSource, begin: int, end: int) -> dict[str, Any]:
    """Return the texts, or the values per token as base64 arrays, of a range of completions."""
    if source.values is None:
        return {"texts": [completion["text"] for completion in source.completions[begin:end]]}
    span, columns = slice(source.token_starts[begin], source.token_starts[end]), {}
    for name in TokenValues._fields[3:]:
        values = getattr(source.values, name)[span]
        if name == "text_index" and len(source.values.texts) <= 2**16:
            values = values.astype(np.uint16)
        if values.dtype.kind != "f" or not np.isnan(values).all():
            kind = values.dtype.newbyteorder("<")
            columns[name] = [kind.str[1:], base64.b64encode(values.astype(kind).tobytes()).decode()]
    return {"columns": columns}
