"""Reasoning-gym task: problems that the generators of the library make from a seed, and their division into sets.

The problems are made in a process with a fixed hash seed: some generators iterate over sets of texts or use the
global random state, and would otherwise return other problems in each process.
"""

import contextlib
import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module, metadata
from itertools import chain
from typing import Any

from bandpo_cli.config.task import ReasoningGymTask
from bandpo_cli.errors import ConfigError, describe_exit, first_line, nearest, unknown_choice
from bandpo_cli.tasks.task import Task, build_prompt, hash_order, text_hash
from bandpo_cli.types import Problem, derive_seed

EXCLUDED = {
    "composite": "it mixes generators, which task.names also does",
    "boxnet": "it has no reference answers, and its scorer raises errors for answers of an unexpected form",
}
"""Generators that cannot be used, with the reason. All others score their own references, or for those without
references another correct answer, as 1."""

_PROCESS_SOURCE = (
    "import sys; sys.path[:] = {path!r}; import bandpo_cli.tasks.reasoning_gym as gym; gym.main()"
)
_GRADER = "reasoning-gym"
_MAX_ROUNDS = 4  # Data sets of the requested size that are made in the search for distinct problems


class ReasoningGym(Task):
    """Problems of several generators: a training set that mixes all, and one held-out set of each."""

    def __init__(self, config: ReasoningGymTask) -> None:
        """Check the names and the options; raise ConfigError if the library does not have or accept them."""
        super().__init__(_GRADER, self._train, lambda: self._make("heldout", {}))
        if not config.names:
            raise ConfigError(
                "task.names: name at least one generator: --task reasoning-gym:NAME; --task reasoning-gym:list prints "
                "the names"
            )
        known = _registered()
        for key, names in (("task.names", config.names), ("task.options", config.options)):
            for name in names:
                if name in EXCLUDED:
                    raise ConfigError(f"{key}: the generator '{name}' cannot be used: {EXCLUDED[name]}")
                if name not in known:
                    raise ConfigError(
                        f"{key}: reasoning-gym has no generator '{name}'{nearest(name, known)}; "
                        "--task reasoning-gym:list prints all"
                    )
        if repeated := next((name for name, count in Counter(config.names).items() if count > 1), None):
            raise ConfigError(f"task.names: {repeated} is named more than once; set its share with its size")
        for name, options in config.options.items():
            _check_options(name, options)
        self._config, self._system, messages = config, config.system, _library("utils").SYSTEM_PROMPTS
        if self._system is not None:  # the name of a message of the library, or a text
            if self._system not in messages and " " not in self._system.strip():
                choices = unknown_choice(self._system, messages)
                raise ConfigError(f"task.system = '{self._system}': {choices}, or a custom text")
            self._system = messages.get(self._system, self._system)
        self.notes = [f"reasoning-gym {metadata.version('reasoning-gym')}"]
        self.notes += [
            f"{name}: options without effect, it is not in task.names"
            for name in config.options
            if name not in config.names
        ]
        if "<answer>" not in f"{self._system}{config.template}":
            self.notes.append(
                "task: neither the system message nor the template asks for <answer>...</answer>, and only that is "
                "scored"
            )

    def _train(self) -> list[Problem]:
        return hash_order(chain.from_iterable(self._make("train", self.heldout_sets()).values()))

    def _make(self, part: str, excluded: Mapping[str, Sequence[Problem]]) -> dict[str, list[Problem]]:
        """Return the problems of one part by generator, without those of `excluded`."""
        config = self._config
        jobs: list[dict[str, Any]] = []
        for name in config.names:
            options = dict(config.options.get(name, {}))
            size = options.pop("size", config.size)
            size = size if part == "train" else config.heldout_size
            seed = derive_seed(config.seed, _GRADER, part, name)
            ids = [problem.id for problem in excluded.get(name, ())]
            jobs.append({"name": name, "options": options, "size": size, "seed": seed, "excluded": ids})
        made = {}
        for name, job, entries in zip(config.names, jobs, _run_generators(jobs), strict=True):
            if not entries:
                raise ConfigError(
                    f"task.names = '{name}': all problems that it makes with these options are held out; lower "
                    "task.heldout_size, or widen its options"
                )
            if len(entries) < job["size"]:
                self.notes.append(
                    f"{name}: only {len(entries):,} different {part} problems of {job['size']:,}"
                )
            extra = {"generator": name, "options": json.dumps(job["options"])}
            made[name] = hash_order(
                Problem(
                    f"{name}/{text_hash(question)}",
                    build_prompt(question, config.template, self._system),
                    answer or "",
                    name,
                    _GRADER,
                    extra | {"entry": entry},
                    question,
                )
                for question, answer, entry in entries
            )
        return made


def describe_generators() -> dict[str, str]:
    """Return the options of each usable generator with their defaults as a text, by name."""
    return {name: _listed(_default_options(name), " ") for name in sorted(_registered())}


def generate(
    name: str, options: Mapping[str, Any], seed: int, size: int, excluded: Collection[str] = ()
) -> list[tuple[str, str | None, str]]:
    """Make `size` problems of a generator, with different questions and without the ids in `excluded`.

    Return question, reference answer (None if the library has none) and the complete problem as a Python literal. There
    are fewer than `size` if `_MAX_ROUNDS * size` problems of the generator have fewer different questions.
    """
    create_dataset = _library("factory").create_dataset
    excluded = set(excluded)
    made: dict[str, tuple[str, str | None, str]] = {}
    for round_index in range(_MAX_ROUNDS):
        round_seed = derive_seed(seed, round_index)
        random.seed(round_seed)  # list_functions uses the global state
        # numpy, which some generators use, accepts seeds below 2**32; a generator adds the index to the seed.
        dataset = create_dataset(name, **options, seed=round_seed % 2**31, size=size)
        for index in range(size):
            entry = dataset[index]
            question = entry["question"]
            if question not in made and f"{name}/{text_hash(question)}" not in excluded:
                made[question] = (question, entry["answer"], repr(_plain(entry)))
            if len(made) == size:
                return [*made.values()]
    return [*made.values()]


def main() -> None:
    """Read jobs, arguments of `generate`, as JSON from standard input, and write their results."""
    results = []
    with contextlib.redirect_stdout(sys.stderr):  # some generators print
        for job in json.load(sys.stdin):
            try:
                results.append(generate(**job))
            except Exception as error:  # noqa: BLE001 - what a generator raises for options that it cannot use
                sys.exit(f"{job['name']}: {type(error).__name__}: {first_line(error)}")
    json.dump(results, sys.stdout)


def _run_generators(jobs: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, str | None, str]]]:
    """Call `generate` for each job in a process with a fixed hash seed; raise ConfigError if one fails."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROCESS_SOURCE.format(path=sys.path)],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    if done.returncode:
        output = done.stderr.strip().splitlines() or ["no message"]
        raise ConfigError(
            f"task: a generator of reasoning-gym failed with these options: {output[-1]} (its process "
            f"{describe_exit(done.returncode)})"
        )
    results: list[list[tuple[str, str | None, str]]] = json.loads(done.stdout)
    return results


def _plain(value: Any) -> Any:
    """Return a value whose `repr` is a Python literal; raise TypeError if it has none."""
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if type(value) is tuple else list)(map(_plain, value))
    value = value.item() if hasattr(value, "item") else value  # a numpy scalar
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TypeError(f"a problem contains {value!r:.60}, which cannot be stored")


def _library(module: str) -> Any:
    """Return a module of the library. Without compiled bytecode, a dependency of it prints SyntaxWarnings."""
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
        return import_module(f"reasoning_gym.{module}")


def _registered() -> dict[str, Any]:
    """Return the classes of data set and options of the usable generators, by name."""
    datasets = _library("factory").DATASETS
    return {name: classes for name, classes in datasets.items() if name not in EXCLUDED}


def _default_options(name: str) -> dict[str, Any]:
    """Return the defaults of the options that a configuration can have, which have no dates or objects as values."""
    kinds = (type(None), bool, int, float, str, list, tuple)
    values = dataclasses.asdict(_registered()[name][1]()).items()
    return {key: value for key, value in values if key not in ("seed", "size") and type(value) in kinds}


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the generator has these options and accepts their values."""
    defaults = _default_options(name)
    known = {"size": 500, **defaults}
    where = f"task.options.{name}"
    if "seed" in options:
        raise ConfigError(f"{where}.seed: the seed of all generators is task.seed")
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"{where}.{key}: {unknown_choice(key, known)}")
        # The annotations of the library are not used: some contradict its own defaults.
        kind = list if isinstance(known[key], tuple) else type(known[key])
        if known[key] is not None and type(value) is not kind and (kind, type(value)) != (float, int):
            raise ConfigError(
                f"{where}.{key} = {_short(value)}: expected {kind.__name__}, as its default {_short(known[key])}"
            )
    if options.get("size", 1) < 1:
        raise ConfigError(f"{where}.size = {options['size']}: expected a whole number above 0")
    try:
        config = _registered()[name][1](**options)
        if hasattr(config, "validate"):  # two generators accept any value
            config.validate()
    except Exception as error:  # noqa: BLE001 - most raise AssertionError, some TypeError or ValueError
        raise ConfigError(
            f"{where}: {_listed(options, ', ')} not accepted: {first_line(error)}; "
            f"defaults: {_listed(defaults, ', ')}"
        ) from None


def _listed(options: Mapping[str, Any], separator: str) -> str:
    return separator.join(f"{key}={_short(value)}" for key, value in options.items())


def _short(value: Any) -> str:
    text = repr([*value]) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
