"""Reasoning-gym task: which problems it makes, how it divides them, and which settings it refuses."""

import io
import json
import subprocess
import sys
from ast import literal_eval
from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.task import ReasoningGymTask, task_from_arguments
from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks import reasoning_gym as module
from bandpo_cli.tasks.reasoning_gym import EXCLUDED, ReasoningGym, describe_generators, generate
from bandpo_cli.tasks.task import build_task, text_hash
from bandpo_cli.types import Message, Problem, derive_seed

reasoning_gym = pytest.importorskip("reasoning_gym")

FIVE = ["leg_counting", "chain_sum", "spell_backward", "maze", "isomorphic_strings"]
"""Counting, arithmetic, texts, a grid, and a generator whose problems depend on the hash seed of the process."""


def question(problem: Problem) -> str:
    message = problem.prompt[-1]
    return message.content


def settings(**values: Any) -> ReasoningGymTask:
    config = resolve([{"task": {"name": "reasoning-gym", **values}}]).task
    assert isinstance(config, ReasoningGymTask)
    return config


@pytest.fixture(scope="module")
def five():
    """The problems are made in a process that would have the hash seed 77."""
    task = ReasoningGym(settings(names=FIVE, size=12, heldout_size=8, options={"maze": {"size": 3}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "77")
        task.train_problems()
    return task


@pytest.mark.slow
def test_sizes_are_the_shares_of_the_generators_and_the_problems_are_complete(five):
    from reasoning_gym.utils import SYSTEM_PROMPTS

    train = five.train_problems()
    counts = {name: sum(problem.source == name for problem in train) for name in FIVE}
    assert counts == dict.fromkeys(FIVE, 12) | {"maze": 3}
    assert {label: len(problems) for label, problems in five.heldout_sets().items()} == dict.fromkeys(FIVE, 8)
    assert len({problem.source for problem in train[:12]}) >= 3, "the generators are mixed"
    for problems in (train, *five.heldout_sets().values()):
        in_order = sorted(problems, key=lambda problem: text_hash(problem.id))
        assert list(problems) == in_order, "any prefix is fair"
    assert five.notes == [f"reasoning-gym {version('reasoning-gym')}"]
    for problem in train:
        entry = literal_eval(str(problem.extra["entry"]))
        assert entry["metadata"]["source_dataset"] == problem.source == problem.extra["generator"]
        assert (question(problem), problem.answer) == (entry["question"], entry["answer"])
        assert problem.prompt[0] == Message("system", SYSTEM_PROMPTS["default"])
        assert reasoning_gym.create_dataset(problem.source).score_answer(problem.answer, entry) == 1


@pytest.mark.slow
def test_the_problems_are_equal_in_a_process_with_another_hash_seed(five, monkeypatch):
    """The comparison can fail: in this process, whose hash seed is random, the library makes other problems."""
    monkeypatch.setenv("PYTHONHASHSEED", "78")
    name = "isomorphic_strings"
    ours = five.heldout_sets()[name]
    assert ReasoningGym(settings(names=name, heldout_size=8)).heldout_sets()[name] == ours
    seed = derive_seed(0, "reasoning-gym", "heldout", name)
    here = {text for text, _, _ in generate(name, {}, seed, 8)}
    assert sys.flags.hash_randomization == 0 or here != {question(problem) for problem in ours}


def test_neighbouring_seeds_share_no_problems():
    """The library adds the index to the seed: its data sets of the seeds 0 and 1 are equal but for one problem."""
    sets = [reasoning_gym.create_dataset("chain_sum", seed=seed, size=20) for seed in (0, 1)]
    library = [{data[i]["question"] for i in range(20)} for data in sets]
    assert len(library[0] & library[1]) == 19
    ours = [{text for text, _, _ in generate("chain_sum", {}, seed, 20)} for seed in (0, 1)]
    assert not ours[0] & ours[1]


@pytest.fixture
def in_process(monkeypatch):
    """Run the generators in this process, which saves two seconds per set of problems."""

    def run(*_: Any, input: str, **__: Any) -> Any:
        replies = io.StringIO()
        with mock.patch.object(sys, "stdin", io.StringIO(input)), mock.patch.object(sys, "stdout", replies):
            try:
                module.main()
            except SystemExit as error:
                return subprocess.CompletedProcess([], 1, "", f"{error}\n")
        return subprocess.CompletedProcess([], 0, replies.getvalue(), "")

    monkeypatch.setattr(module.subprocess, "run", run)


@pytest.mark.usefixtures("in_process")
def test_a_generator_with_few_problems_gives_fewer_and_a_note():
    few = {"min_value": 1, "max_value": 3, "size": 50}
    task = ReasoningGym(settings(names="lcm", heldout_size=4, options={"lcm": few, "gcd": {}}))
    train, heldout = task.train_problems(), task.heldout_sets()["lcm"]
    assert 0 < len(train) < 20
    assert not {question(p) for p in train} & {question(p) for p in heldout}
    assert task.notes[1:] == [
        "gcd: options without effect, it is not in task.names",
        f"lcm: only {len(train)} different train problems of 50",
    ]


@pytest.mark.usefixtures("in_process")
def test_no_problem_left_or_an_error_of_a_generator_is_one_line():
    for name, options, message in (
        ("lcm", {"min_value": 1, "max_value": 2}, r"lower task\.heldout_size"),
        ("spell_backward", {"data_file": "none.txt"}, r"spell_backward: FileNotFoundError: .*none\.txt"),
    ):
        with pytest.raises(ConfigError, match=message):
            ReasoningGym(settings(names=name, heldout_size=20, options={name: options})).train_problems()


@pytest.mark.usefixtures("in_process")
def test_options_and_templates_reach_the_problems():
    options = {"chain_sum": {"min_terms": 3, "max_terms": 3}}
    sizes = {"size": 20, "heldout_size": 5, "seed": 4, "options": options}
    config = settings(names=["chain_sum"], system=None, template="Q: {question} {x}", **sizes)
    task = ReasoningGym(config)
    for problem in task.train_problems():
        assert len(problem.prompt) == 1
        assert question(problem).startswith("Q: State")
        assert question(problem).endswith(" {x}")
        assert literal_eval(str(problem.extra["entry"]))["metadata"]["num_terms"] == 3
        assert json.loads(str(problem.extra["options"])) == {"min_terms": 3, "max_terms": 3}
    assert "neither the system message nor the template asks for <answer>" in task.notes[1]
    other = ReasoningGym(config.model_copy(update={"seed": 5}))
    assert not {p.id for p in task.train_problems()} & {p.id for p in other.train_problems()}


WRONG = [
    ({}, ["name at least one generator", "reasoning-gym:list"]),
    ({"names": ["leg_count"]}, ["no generator 'leg_count'", "did you mean 'leg_counting'"]),
    ({"names": ["composite"]}, ["'composite' cannot be used", "task.names also does"]),
    ({"names": ["gcd", "gcd"]}, ["gcd is named more than once"]),
    ({"options": {"gdc": {}}}, ["task.options: reasoning-gym has no generator 'gdc'", "did you mean 'gcd'"]),
    ({"options": {"gcd": {"max_valeu": 3}}}, ["gcd.max_valeu", "did you mean 'max_value'", "min_numbers"]),
    ({"options": {"gcd": {"max_value": "3"}}}, ["gcd.max_value = '3': expected int", "1000"]),
    ({"options": {"gcd": {"max_value": True}}}, ["expected int"]),
    ({"options": {"maze": {"max_dist": 2.5}}}, ["expected int"]),
    ({"options": {"syllogism": {"allow_all": 1}}}, ["expected bool"]),
    ({"options": {"basic_arithmetic": {"operators": "+"}}}, ["expected list"]),
    ({"options": {"gcd": {"min_numbers": 1}}}, ["min_numbers=1 not accepted", "at least 2", "max_value=1000"]),
    ({"options": {"gcd": {"size": 0}}}, ["gcd.size = 0"]),
    ({"options": {"gcd": {"seed": 1}}}, ["gcd.seed", "task.seed"]),
    ({"options": {"time_intervals": {"min_time": "08:00"}}}, ["min_time: unknown"]),
    ({"names": ["gcd"], "template": "x"}, ["the template needs {question} in the place of the question"]),
    ({"system": "defualt"}, ["task.system = 'defualt': unknown", "did you mean 'default'"]),
]  # fmt: skip


def test_wrong_settings_are_refused_before_anything_is_made():
    for values, parts in WRONG:
        base = {"names": ["gcd"]} if "options" in values or "system" in values else {}
        with pytest.raises(ConfigError) as caught:
            build_task(settings(**{**base, **values}))
        assert all(part in str(caught.value) for part in parts), caught.value


def test_options_of_later_layers_are_merged_key_by_key():
    layers = [
        {"task": {"name": "reasoning-gym", "names": ["gcd"], "options": {"gcd": {"size": 1}, "lcm": {"size": 2}}}},
        {"task": {"options": {"gcd": {"max_value": 9}}}},
        {"task": task_from_arguments(["reasoning-gym:maze", "reasoning-gym:gcd"])},
    ]  # fmt: skip
    task = resolve(layers).task
    assert task.options == {"gcd": {"size": 1, "max_value": 9}, "lcm": {"size": 2}}
    assert task.names == ("maze", "gcd")


def test_the_list_has_every_generator_of_the_library_but_the_excluded_ones():
    from reasoning_gym.factory import DATASETS

    found = describe_generators()
    assert {*found} == {*DATASETS} - {*EXCLUDED}
    assert found["gcd"] == "min_numbers=2 max_numbers=2 min_value=1 max_value=1000"


ANSWER_IN_METADATA = {
    "graph_color": lambda data: json.dumps(data["possible_answer"]),
    "propositional_logic": lambda data: data["example_answer"],
    "rubiks_cube": lambda data: data["example_correct_answer"],
}
"""Correct answers of the generators without references."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*ANSWER_IN_METADATA, *sorted({*describe_generators()} - {"rush_hour"})[::4]]
)
def test_listed_generators_score_correct_answers_as_1(name):
    """A problem of every fourth generator, as stored; rush_hour has no example of a correct answer."""
    for _, answer, text in generate(name, {}, seed=3, size=1):
        entry = literal_eval(text)
        correct = ANSWER_IN_METADATA[name](entry["metadata"]) if answer is None else answer
        assert reasoning_gym.create_dataset(name).score_answer(correct, entry) == 1


def test_a_process_that_ends_early_is_one_line(monkeypatch):
    monkeypatch.setattr(module, "_PROCESS_SOURCE", "import sys; sys.exit('out of luck')")
    with pytest.raises(ConfigError, match=r"out of luck \(its process ended with exit code 1\)"):
        ReasoningGym(settings(names="gcd")).heldout_sets()
