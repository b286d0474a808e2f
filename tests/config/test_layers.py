"""Layers of settings: precedence, dropped fields of another kind, and one-line error messages."""

from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.batch_and_sampling import OptimConfig
from bandpo_cli.config.layers import (
    flatten,
    nest,
    read_assignments,
    read_config,
    read_layer,
    resolve,
    to_yaml,
    with_values,
)
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments import evaluate, sweep, train
from bandpo_cli.sweeps.sweep_plan import SweepConfig

GSM8K = {"task": {"name": "gsm8k", "train": ["mine.jsonl"], "template": "boxed"}}
BAND = {"bounds": {"method": "band", "delta": 0.2, "max_ratio": 5.0}}
MATH = {"task": {"name": "math", "train": {"name": "math", "levels": [3, 4, 5]}}}


@pytest.mark.parametrize(
    ("layers", "equal"),
    [
        # later layers win key by key, those of `--set` too
        ([{"optim": {"lr": 1e-3, "updates": 8}}, {"optim": {"lr": 2e-3}}, ["optim.lr=3e-3"]],
         {"optim": {"lr": 3e-3, "updates": 8}}),
        # another tag drops the fields of earlier layers, the same tag keeps them
        ([BAND, {"bounds": {"method": "clip"}}], {"bounds": {"method": "clip"}}),
        ([BAND, {"bounds": {"method": "dcpo", "eps_low": 0.1}}], {"bounds": {"method": "dcpo", "eps_low": 0.1}}),
        ([BAND, {"bounds": {"divergence": "tv"}}], {"bounds": {**BAND["bounds"], "divergence": "tv"}}),
        ([BAND, {"bounds": {"method": "band", "delta": 1}}], {"bounds": {**BAND["bounds"], "delta": 1}}),
        ([GSM8K, {"task": {"name": "math"}}], {"task": {"name": "math"}}),
        ([GSM8K, {"task": {"name": "data"}}], {"task": {"name": "data"}}),
        ([{"task": {"numbers": 3}}, {"task": {"name": "gsm8k"}}], {"task": {"name": "gsm8k"}}),
        # of a section without a tag, what the default class does not have stays, and what all classes have
        ([{"task": {"numbers": 3, "template": "boxed", "tools": ["m:f"]}}, {"task": {"name": "gsm8k"}}],
         {"task": {"name": "gsm8k", "template": "boxed", "tools": ["m:f"]}}),
        ([{"bounds": {"delta": 0.2}}, {"bounds": {"method": "ripo"}}], {"bounds": {"method": "ripo"}}),
        ([GSM8K, ["task.template=plain"]], {"task": {**GSM8K["task"], "template": "plain"}}),
        ([GSM8K, {"task": {"name": "gsm8k", "system": "x"}}], {"task": {**GSM8K["task"], "system": "x"}}),
        ([GSM8K, {"task": {"train": "x.jsonl"}}], {"task": {**GSM8K["task"], "train": ["x.jsonl"]}}),
        # the settings of a task that is not the final one leave no defaults behind
        ([GSM8K, {"task": {"name": "countdown"}}], {}),
        # a single source is merged key by key
        ([MATH, ["task.train.limit=100"]],
         {"task": {"name": "math", "train": [{"name": "math", "levels": [3, 4, 5], "limit": 100}]}}),
        # a number is the index of an element
        ([{"task": {"name": "data", "train": [{"path": "a"}, {"path": "b"}]}}, ["task.train.1.fields.question=q"]],
         {"task": {"name": "data", "train": [{"path": "a"}, {"path": "b", "fields": {"question": "q"}}]}}),
        # the order of assignments does not matter
        ([["bounds.method=clip", "bounds.eps_high=0.3"]], {"bounds": {"method": "clip", "eps_high": 0.3}}),
        ([["bounds.eps_high=0.3", "bounds.method=clip"]], {"bounds": {"method": "clip", "eps_high": 0.3}}),
    ],
)  # fmt: skip
def test_layers_are_merged(layers, equal):
    merged = resolve([read_assignments(layer) if isinstance(layer, list) else layer for layer in layers])
    assert merged.model_dump() == resolve([equal]).model_dump()


@pytest.mark.parametrize(
    ("model", "task"), [("embedded", "countdown"), ("embedded-calculator", "calculator")]
)
def test_a_bundled_model_decides_the_task_only_where_none_is_named(model, task):
    assert resolve([{"model": {"path": model}}]) == resolve([{"task": {"name": task}}])
    for named in {"countdown", "calculator"} - {task}:
        config, other = (resolve({"task.name": named, "model.path": path}) for path in (model, "another"))
        assert config == other.model_copy(update={"model": config.model})


def test_no_layer_gives_the_defaults_which_the_countdown_file_states():
    assert resolve([]) == RunConfig()
    assert resolve([read_layer(Path(__file__).parents[2] / "configs" / "countdown.yaml")]) == RunConfig()


@pytest.mark.parametrize(
    "layer",
    [
        {"bounds": {"method": "band", "divergence": "js", "relax": {"eps_low": 0.1}}, "steps": 7},
        {"task": {"name": "gsm8k", "heldout": "aime24", "template": "{question}", "train": [
            "gsm8k", {"path": "x.jsonl", "fields": {"answer": "a.b"}, "levels": [1, 2], "label": "x"}]}},
    ],
)  # fmt: skip
def test_a_config_round_trips_through_yaml(tmp_path, layer):
    (tmp_path / "config.yaml").write_text(to_yaml(resolve([layer])), encoding="utf-8")
    assert resolve([read_layer(tmp_path / "config.yaml")]) == resolve([layer])


def test_a_password_is_in_neither_the_config_nor_the_error_message():
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI") as caught:
        resolve([{"tracking": {"uri": "postgresql://user:secret@db/mlflow"}}])
    assert "secret" not in str(caught.value)
    assert resolve([{"tracking": {"uri": "postgresql://db/mlflow"}}]).tracking.uri == "postgresql://db/mlflow"


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("optim.prompts=4", ["optim.prompts: no such setting (did you mean 'sampling.prompts'?)"]),
        ("optim.micro_batch_tokens=0", ["tokens = 0: a whole number above 0 is expected, or auto"]),
        ("optim.lrr=1", ["optim.lrr", "no such setting", "did you mean 'lr'", "micro_batch_tokens"]),
        ("bonds={}", ["bonds", "did you mean 'bounds'"]),
        ("bounds.divergence=k1", ["bounds.divergence = 'k1'", "did you mean 'kl'", "hellinger"]),
        ("bounds.delta=.nan", ["bounds.delta = nan", "finite"]),
        ("bounds.detla=0.1", ["bounds.detla", "did you mean 'delta'"]),
        ("bounds.relax.eps_lo=0.1", ["bounds.relax.eps_lo", "did you mean 'eps_low'"]),
        ("objective.aggregation=token_mean", ["objective.aggregation", "did you mean 'token-mean'"]),
        ("optim.updates=7", ["sampling.prompts = 64", "optim.updates = 7", "63"]),
        ("optim.betas=0.9,0.99", ["optim.betas = '0.9,0.99': a list is expected here, such as optim.betas=[0.9,0.99]"]),
        ("model.chat_template_kwargs=false",
         ["keys with values are expected here, such as model.chat_template_kwargs.KEY=VALUE"]),
        ("evaluation.k=1,x", ["evaluation.k[1] = 'x': expected an integer"]),
        ("optim=3", ["optim = 3", "section"]),
        ("task.name=gsm8", [
             "= 'gsm8': unknown (did you mean 'gsm8k'?); allowed: countdown, calculator, reasoning-gym, data"]),
        ("task.name=[gsm8k]", ["task.name = ['gsm8k']", "unknown"]),
        ("task={name: gsm8k, tempate: 1}", ["task.tempate", "of 'gsm8k'", "did you mean 'template'"]),
        ("task={name: gsm8k, numbers: 3}", ["task.numbers: no such setting of 'gsm8k'", "heldout"]),
        ("task.train=x.jsonl", ["task.train: no such setting of 'countdown'", "of data, gsm8k", "add name: data"]),
        ("bounds={method: gspo, delta: 0.1}",
         ["of 'gspo'; known: method, eps_low", "; a setting of band, ripo, atr, dppo, cppo"]),
        ("task={name: data, train: [a.jsonl, {pth: x}]}",
         ["task.train[1].pth: no such setting (did you mean 'path'?); known: name, path, subset"]),
        ("task={name: data, train: [{name: gsm9}]}",
         ["task.train[0].name = 'gsm9': no data set of that name (did you mean 'gsm8k'?); known: gsm8k, math"]),
        ("task={name: data, train: [{}]}", ["task.train[0] = {}", "give it a name (gsm8k", "or a path"]),
        ("task={name: data, heldout: [{path: x, fields: {qestion: q}}]}",
         ["task.heldout[0].fields.qestion: no such setting (did you mean 'question'?)"]),
        ("model.lora.alpha=2", ["model.lora.rank: no value is given; add --set model.lora.rank=VALUE"]),
        ("model.lora.rnk=4", ["model.lora.rnk: no such setting (did you mean 'rank'?)", "known: rank, alpha"]),
        ("model.lora=true", ["model.lora = True", "with keys below it: rank, alpha, target_modules"]),
    ],
)  # fmt: skip
def test_an_invalid_setting_gives_a_one_line_message(setting, parts):
    with pytest.raises(ConfigError) as caught:
        resolve([read_assignments([setting])])
    assert "\n" not in str(caught.value)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"optim: {lr: 1e-3", "not readable as YAML"),
        (b"- 1\n- 2\n", "a list"),
        (b"hello", "found a text"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"steps: 3\nsteps: 4\n", "'steps' is given twice"),
        (b"optim: {lr: 1, <<: {updates: 2}, lr: 2}\n", "'lr' is given twice"),
        (b"optim:\n  <<: {lr: 1}\n  <<: {updates: 2}\n", "line 3: not readable as YAML: '<<' is given twice"),
        (b"optim: {<<: 3}\n", "expected a mapping or list of mappings for merging, but found scalar"),
        (b"? [a, b]\n: 1\n", "unhashable key"),
        (b"a: !!python/object/apply:os.system [ls]\n", "not readable as YAML"),
        (b"[" * 1100, "not readable as YAML"),
        (b"a: !!int x", "not readable as YAML: ValueError"),
        (b"a: \x07", "not readable as YAML: control characters are not allowed"),
    ],
)
def test_an_unreadable_file_gives_a_one_line_message(tmp_path, content, part):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_layer(path)
    assert part in str(caught.value)
    assert "broken.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_merge_keys_take_entries_of_other_mappings(tmp_path):
    """The entries of the mapping itself win, then those of the first merged mapping; merges may be nested."""
    path = tmp_path / "merged.yaml"
    path.write_text(
        "variants:\n"
        "  base: &base {method: clip, eps: 0.2}\n"
        "  wide: &wide {<<: *base, eps: 0.3}\n"
        "  both: {<<: [*wide, {eps: 0.4, extra: 1}], method: dcpo}\n"
        "  again: *wide\n"
    )
    assert read_layer(path)["variants"] == {
        "base": {"method": "clip", "eps": 0.2},
        "wide": {"method": "clip", "eps": 0.3},
        "both": {"method": "dcpo", "eps": 0.3, "extra": 1},
        "again": {"method": "clip", "eps": 0.3},
    }


def test_an_error_in_a_merged_entry_names_its_line(tmp_path):
    path = tmp_path / "merged.yaml"
    path.write_text("sampling: &shared\n  prompts: 8\n  lr: -1\noptim:\n  <<: *shared\n")
    assert read_config(path).locate(["optim", "lr"]) == f"--config {path}, line 3"


def test_a_missing_file_is_an_error_and_an_empty_one_is_not(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_layer(tmp_path / "nowhere.yaml")
    empty = tmp_path / "empty.yaml"
    empty.write_text("# empty\n")
    assert read_layer(empty) == {}


def test_nested_and_dotted_settings():
    nested = {"a": {"b": 1, "c": {"d": [1, 2]}}, "e": None}
    assert flatten(nested) == {"a.b": 1, "a.c.d": [1, 2], "e": None}
    assert nest(flatten(nested)) == nested
    assert flatten({"a": {}, "b": 1}) == {"b": 1}
    assert flatten({"a": {}, "b": 1}, keep_empty=True) == {"a": {}, "b": 1}
    lists = {"a": [{"b": 1}, {"b": [2, 3]}]}
    assert flatten(lists) == {"a": lists["a"]}
    assert flatten(lists, expand_lists=True) == {"a.0.b": 1, "a.1.b": [2, 3]}


@pytest.mark.parametrize("key", ["task.template", "task.system"])
def test_a_text_needs_no_quotes_whatever_it_contains(key):
    for text in (
        "{question}", "{question} Reply: [a number]", "[x] {question}", "a: {question}", "{question} # c",
        '"{question}" yes', '"a" or "{question}"', "> {question}", "{a: {question}", "- {question}", "@{question}",
        "{question}=", "1e-3", "null?", "",
    ):  # fmt: skip
        assert flatten(read_assignments([f"{key}={text}"])) == {key: text}
    for text, value in (
        ('"a:\\n{question}"', "a:\n{question}"),
        ("'{question} #'", "{question} #"),
        ("null", None),
    ):
        assert flatten(read_assignments([f"{key}={text}"])) == {key: value}
    assert read_assignments(["evaluation.k=[1, 2]  # pass@2"]) == {"evaluation": {"k": [1, 2]}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *((text, r"section\.key=value") for text in ("optim.lr", "=3", "optim..lr=3", ".lr=1")),
        ({"a..b": 1}, r"'a\.\.b': write a setting as section\.key"),
        ({"": 1}, r"'': write a setting as section\.key"),
        ({"a": 1, "a.b": 2}, r"'a\.b': 'a' has a plain value already; give it a value or keys below it, not both"),
    ],
)  # fmt: skip
def test_malformed_and_contradictory_dotted_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        read_assignments([settings]) if isinstance(settings, str) else nest(settings)


def test_settings_in_python_are_dictionaries_and_objects_alike():
    expected = resolve([{"steps": 2, "bounds": {"method": "clip"}, "optim": {"lr": 1e-3}}])
    given: list[Any] = [
        {"steps": 2, "bounds.method": "clip", "optim": {"lr": 1e-3}},
        {"optim": {"lr": 1}, "optim.lr": 1e-3, "steps": 2, "bounds": {"method": "clip"}},
        [expected.model_copy(update={"steps": 3}), {"steps": 2}],
        {"steps": 2, "bounds": expected.bounds, "optim.lr": 1e-3},
    ]
    assert [resolve(settings) for settings in given] == [expected] * len(given)
    dppo = resolve({"bounds.delta": 0.3, "bounds.method": "dppo"})
    assert dppo == resolve({"bounds.method": "dppo", "bounds.delta": 0.3}), "the order decides nothing"
    assert dppo.bounds.delta == 0.3


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: resolve({"step": 1}), "step: no such setting (did you mean 'steps'?)"),
        (lambda: resolve({"sampling.num_generations": 8}), "(did you mean 'sampling.samples'?)"),
        (lambda: RunConfig(step=2), "step: no such setting (did you mean 'steps'?)"),
        (lambda: RunConfig({"steps": 2}), "RunConfig: give values by name, RunConfig(key=value), or a dictionary"),
        (lambda: RunConfig(steps="two"), "steps = 'two': expected an integer"),
        (lambda: RunConfig(optim={"lr": -1}), "optim.lr = -1: input should be greater than 0"),
        (lambda: RunConfig(bounds={"method": "clop"}), "bounds.method = 'clop'"),
        (lambda: OptimConfig(learning_rate=1), "(did you mean 'optim.lr'?)"),
        (lambda: SweepConfig(seeds=[-1]), "seeds[0] = -1"),
        (lambda: setattr(RunConfig(), "steps", 2), "steps = 2: settings are frozen"),
        (lambda: resolve("gsm8k"), "'gsm8k': expected settings as a dictionary, with keys among seed"),
        (lambda: train({"epochs": 1}), "epochs: no such setting"),
        (lambda: train(None), "None: expected settings as a dictionary"),
        (lambda: with_values(RunConfig(), {"optim.lr.x": 2}), "optim.lr = {'x': 2}"),
        (lambda: evaluate(tasks="gsm9k"), "gsm9k: no such task or file"),
        (lambda: evaluate(settings=3), "3: expected settings as a dictionary"),
        (lambda: sweep({"sedes": [1]}), "sedes: no such setting (did you mean 'seeds'?)"),
    ],
)  # fmt: skip
def test_a_mistake_in_python_has_the_message_of_the_command_line(mistake, message):
    with pytest.raises(ConfigError) as caught:
        mistake()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("-2E+4", -2e4), ("[1e-1, 2]", [0.1, 2]), ("1.5e-3", 1.5e-3), ("e3", "e3"), ("1e-3x", "1e-3x")],
)  # fmt: skip
def test_options_of_a_generator_are_numbers_also_without_a_decimal_point(text, value):
    """YAML 1.1 reads 1e-3 as text, and these settings have no type that would make it a number."""
    layer = read_assignments(["task.name=reasoning-gym", "task.names=x", f"task.options.x.p={text}"])
    config = resolve([layer])
    assert config.model_dump()["task"]["options"] == {"x": {"p": value}}
    assert resolve([config.model_dump()]) == config
