"""Configurations of TRL 1.16 and verl 0.9.1 as settings of a run here, with what has no place.

from_trainers.yaml has a row for each key of the other trainers: its setting here, its default there, or why it has no
place. The functions below read the keys whose meaning follows from several of them (`computed` in the table), such as
the sizes of a batch.
"""

import math
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bandpo_cli.config.layers import flatten, nest, parse_yaml, resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.task import yaml_number
from bandpo_cli.errors import ConfigError, log
from bandpo_cli.exports.verl_settings import ACTOR, CORRECTION, NEVER, ROLLOUT, VERL_REJECTIONS, VERL_WEIGHTS
from bandpo_cli.grading.countdown import evaluate_expression
from bandpo_cli.paths import path_exists, read_text, user_path
from bandpo_cli.registries import DATA_TASK, DATASETS, TRACKERS
from bandpo_cli.settings_validation import trainer_keys

Places = Sequence[Mapping[str, Any]]
EMPTY: tuple[Any, ...] = (None, "", [], {})
UNSET: tuple[Any, ...] = (*EMPTY, False, "none")  # 0, which equals False, too


class Translation:
    """The run of another trainer's keys, as settings here.

    Attributes:
        settings: value and comment by dotted setting.
        missing: a line for each key that has no place here, with the reason or what comes nearest.
        updates: optimizer steps of the other trainer per batch of completions.
    """

    def __init__(self, trainer: str, given: Mapping[str, Any]) -> None:
        """Translate keys of `read_trainer_file`, for trl with `num_processes`; raise ConfigError for a mistake."""
        self.trainer, self.title, self.given, self.updates = trainer, trainer.replace("trl", "TRL"), given, 1
        self.rows, self._losses = trainer_keys(trainer), trainer_keys(f"{trainer}_losses")
        self.settings: dict[str, tuple[Any, str]] = {}
        self.missing: list[str] = []
        self._defaults: set[str] = set()  # settings that follow from defaults only
        sections = tuple(f"{name}." for name in self.rows)
        keys = [key for key in given if key != "num_processes"]
        if not any(f"{key}.".startswith(sections) for key in keys):
            other = "verl" if trainer == "trl" else "trl"
            hint = f", but of {other}: --from {other}" if trainer_keys(other).keys() & keys else ""
            found = textwrap.shorten(", ".join(keys), 200, placeholder=" …")
            raise ConfigError(f"--from {trainer}: the file has no key of {self.title}{hint}; it has {found}")
        for key, row in self.rows.items():
            value, default = self.given.get(key), row.get("default")
            if isinstance(value, str) and isinstance(default, int | float) and not isinstance(default, bool):
                raise ConfigError(f"{key} = {value!r}: expected a number, such as {default:g}")
            if "computed" not in row:
                self._convert(key, row)
        {"trl": _trl, "verl": _verl}[trainer](self)
        unknown = [k for k, v in given.items() if v not in UNSET and not f"{k}.".startswith(sections)]
        if unknown:
            found = textwrap.shorten(", ".join(unknown), 600, placeholder=" …")
            self.missing.append(f"keys not in the table of {self.title} here: {found}")
        # Defaults of the other trainer that are the defaults here, too, are left out.
        names = ("task.name", "model.path", "bounds.method")
        tags: dict[str, Any] = {key: self.settings[key][0] for key in names if key in self.settings}
        own = flatten(resolve([nest(tags)]).model_dump(mode="json"), keep_empty=True)
        for key in self._defaults - tags.keys():
            if key in own and own[key] == self.settings[key][0]:
                del self.settings[key]
        try:
            resolve([self.layer()])
        except ConfigError as error:
            self.missing.append(f"bandpo train refuses these settings together: {error}")

    def __getitem__(self, key: str) -> Any:
        """Return a value, the keys of a section, or the default of the other trainer."""
        start = f"{key}."
        below = {k.removeprefix(start): v for k, v in self.given.items() if k.startswith(start)}
        return self.given.get(key, below or self.rows.get(key, {}).get("default"))

    def has(self, key: str) -> bool:
        """Return whether the file has a key or section."""
        return any(f"{name}.".startswith(f"{key}.") for name in self.given)

    def put(self, setting: str, value: Any, *keys: str, note: str = "") -> None:
        """Set a value that follows from `keys`, which are its comment."""
        names = [".".join(key.split(".")[-2:]) + ("" if self.has(key) else " (default)") for key in keys]
        self.settings[setting] = value, "; ".join(filter(None, [", ".join(names), note]))
        self._defaults.discard(setting)
        if keys and not any(map(self.has, keys)):
            self._defaults.add(setting)

    def no_place(self, key: str, reason: str) -> None:
        """Record that a value has no place here."""
        default = "" if self.has(key) else f", the default of {self.title}"
        self.missing.append(f"{key} = {self[key]}{default}: {reason}")

    def put_loss(self, kind: str, kind_key: str, prefix: str = "") -> None:
        """Set the method, its settings and the aggregation by the table of losses."""
        if kind not in self._losses:
            raise ConfigError(f"{kind_key} = {kind!r}: no such loss here; known: {', '.join(self._losses)}")
        row = self._losses[kind]
        for setting, value in row["fixed"].items():
            differs = setting == "objective.aggregation" and (self.updates > 1 or kind == "bnpo")
            self.put(setting, value, kind_key, note=row.get("note", "") if differs else "")
        for setting, names in row["settings"].items():
            sign, _, keys = names.rpartition(" ")
            key = next((key for key in keys.split("|") if self[prefix + key] is not None), keys)
            if (value := self[prefix + key]) is not None or "|" not in names:
                is_cap = setting in ("objective.dual_clip", "bounds.max_weight")
                value = {"1-": lambda x: 1 - x, "1+": lambda x: 1 + x, "": lambda x: x}[sign](value)
                self.put(setting, None if is_cap and value == NEVER else value, prefix + key)

    def put_batch(self, prompts: int, passes: int, steps: int | None, keys: Sequence[str]) -> None:
        """Set prompts, updates and steps; the last `keys` are those of an update's size, passes, steps and epochs."""
        *batch_keys, size_key, passes_key, steps_key, epochs_key = keys
        updates = max(number for number in range(1, min(self.updates, prompts) + 1) if prompts % number == 0)
        self.put("sampling.prompts", prompts, *batch_keys)
        self.put("optim.updates", updates, size_key, passes_key)
        if passes > 1 and self.updates > 1:
            share = f"its {updates} updates have {prompts // updates} prompts each"
            self.no_place(passes_key, f"a completion is in one update of its batch; {share}")
        if updates != self.updates:
            self.no_place(size_key, f"{prompts} prompts are {updates} equal updates, not {self.updates}")
        how = f"set steps to (training problems) × {self[epochs_key]:g} / {prompts}"
        if steps is None:
            self.no_place(epochs_key, f"{how}; it is {RunConfig().steps}, the default here")
        if steps:
            self.put("steps", steps, steps_key)
        else:
            self.put("steps", RunConfig().steps, note=how)

    def put_data(self, train: Places, heldout: Places, key: str, heldout_key: str) -> None:
        """Set the problems: a known data set by its hub id, else the sources, with their prompts unchanged."""
        paths = [place["path"] for place in train]
        known = [name for name, entry in DATASETS.items() if [entry.hub_id] == paths]
        self.put("task.name", known[0] if known else DATA_TASK, key)
        self.put("task.template", "plain", note="the prompts of the data as they are")
        for part, places in {} if known else {"train": train, "heldout": heldout}.items():
            if places:
                self.put(f"task.{part}", places, key if part == "train" else heldout_key)
        for there, flag in ((train, "--task FILE|NAME"), ("model.path" in self.settings, "--model MODEL")):
            if not there:
                self.missing.append(f"the file has nothing for {flag}: add it to the command")

    def put_importance(self, rules: Sequence[Mapping[str, Any]], *keys: str) -> None:
        """Set the rules of the importance correction; without one there is none."""
        self.put("objective.importance" if rules else "objective.importance_cap", rules or None, *keys)

    def put_rewards(self, graders: Sequence[tuple[str, float]], key: str) -> None:
        """Set the grader, or several of them with their weights."""
        if [weight for _, weight in graders] == [1]:
            self.put("task.grader", graders[0][0], key)
        elif graders:
            rewards = [{"grader": name, "weight": weight} for name, weight in graders]
            self.put("task.rewards", rewards, key, note="the first decides which answers are correct")

    def _convert(self, key: str, row: Mapping[str, Any]) -> None:
        """Set what a key means on its own, or record that it has no place."""
        if (value := self[key]) is None or ("with" in row and self[row["with"]] in UNSET):
            return
        if not row.keys() & {"to", "values", "convert"}:
            is_used = "note" in row and (self.has(key) or "with" in row)
            if is_used and value not in (*row.get("same", [row.get("default")]), *UNSET):
                self.no_place(key, row["note"])
        elif "values" in row and value not in row["values"]:
            self.no_place(key, row["why"])
        else:
            value = row["values"][value] if "values" in row else CONVERSIONS[row.get("convert", "")](value)
            several = value if "to" not in row else {row["to"]: value}
            for setting, one in several.items():
                self.put(setting, one, key, note=row.get("note", ""))

    def layer(self) -> dict[str, Any]:
        """Return the settings by section, in the order of a config.yaml."""
        values = nest({key: value for key, (value, _) in self.settings.items()})
        return {key: values[key] for key in RunConfig.model_fields if key in values}

    def to_yaml(self) -> str:
        """Return a config file for `bandpo train -c`, with the keys of the other trainer as comments."""
        return "\n".join(self._lines(self.layer(), "")) + "\n"

    def _lines(self, section: Mapping[str, Any], path: str) -> Iterator[str]:
        indent = "  " * path.count(".")
        for key, value in section.items():
            if f"{path}{key}" not in self.settings:
                yield f"{indent}{key}:"
                yield from self._lines(value, f"{path}{key}.")
                continue
            text = yaml.safe_dump({key: value}, default_flow_style=True, width=math.inf, allow_unicode=True)
            line, comment = f"{indent}{text.strip()[1:-1]}", self.settings[f"{path}{key}"][1]
            if len(line) + len(comment) > 110:
                yield from textwrap.wrap(
                    comment, 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
                )
                comment = ""
            yield f"{line}  # {comment}" if comment else line


def read_trainer_file(path: Path) -> dict[str, Any]:
    """Return the keys of a YAML or JSON file, nested ones with dots; of any other text, its words `key=value`."""
    where = f"--from {path}"
    text = read_text(path, where)
    if not (is_script := path.suffix not in (".yaml", ".yml", ".json")):
        content = parse_yaml(text, where)
    else:
        words = [word.lstrip("+~") for word in shlex.split(_expanded(text), comments=True)]
        pairs = [word.partition("=") for word in words if re.match(r"[a-z][\w.]*=", word)]
        # Words without a dot are variables of a script, unless no key has one.
        pairs = [pair for pair in pairs if "." in pair[0]] or pairs
        # Hydra needs no space after the colon of {eps:1e-8}.
        spaced = [
            (key, re.sub(r"(\w):", r"\1: ", value) if value[:1] == "{" else value) for key, _, value in pairs
        ]
        content = {key: parse_yaml(value, where) for key, value in spaced}
    if not isinstance(content, dict) or not content:
        raise ConfigError(
            f"{where}: `key: value` lines are expected in .yaml or .json, key=value words in other files"
        )
    flat = {key: yaml_number(value) for key, value in flatten(content, keep_empty=True).items()}
    for key, value in flat.items():  # references of OmegaConf; its other resolvers stand for the default
        if isinstance(value, str) and ("$" if is_script else "${") in value:
            reference = re.fullmatch(r"\$\{([\w.]+)\}", value)
            flat[key] = flat.get(reference[1]) if reference else None
            if is_script and flat[key] is None:
                log.warning(
                    "%s: %s = %s is not known here and is left out; export the variable", where, key, value
                )
    return {key: value for key, value in flat.items() if value not in EMPTY}


def _expanded(script: str) -> str:
    """Return a shell script with the values of its variables, and of sums and products, as far as they are known."""
    known, lines = dict(os.environ), []
    for line in script.replace("\\\n", " ").splitlines():
        line = re.sub(
            r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})",
            lambda found: known.get(found[1] or found[2], found[3] or found[0]),
            line,
        )
        for term in re.findall(r"\$\(\(.*?\)\)(?!\))", line):
            numbers = re.sub(r"[A-Za-z_]\w*", lambda found: known.get(found[0], found[0]), term[3:-2])
            if value := evaluate_expression(numbers):
                line = line.replace(term, str(value[0]))
        if found := re.match(r"\s*(?:export\s+)?(\w+)=(['\"]?)([^'\"#]*)\2", line):
            known[found[1]] = found[3].strip()
        lines.append(line)
    return "\n".join(lines)


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "limit": lambda value: value if 0 < value < math.inf else None,
    "share": lambda value: value if value < 1 else None,
    "frequency": lambda value: max(value, 0),
    "names": lambda value: None if "all-linear" in value else [value] if isinstance(value, str) else value,
    "trackers": lambda value: [name for name in TRACKERS if name in value],
}  # fmt: skip
"""From a value of another trainer to the value of the setting, or to several settings."""


# ---- TRL -------------------------------------------------------------------------------------------------------------


def _trl(t: Translation) -> None:
    _trl_batch(t)
    kind, in_sequences = t["loss_type"], t["importance_sampling_level"] == "sequence"
    t.put_loss(kind, "loss_type")
    if in_sequences and t.settings["bounds.method"][0] == "clip":
        t.put_loss("sequence", "importance_sampling_level")
        if t["delta"] is not None:
            del t.settings["objective.dual_clip"]
            t.no_place("delta", "gspo has no dual clip")
    elif any(key.startswith("band_") for key in t.given):
        del t.settings["bounds.eps_low"], t.settings["bounds.eps_high"]
        t.put_loss("band", "loss_type")
    elif in_sequences != (kind == "luspo"):
        t.no_place("importance_sampling_level", f"{t.settings['bounds.method'][0]} has its own ratio")
    if t["use_vllm"]:
        low, high = (t[f"vllm_importance_sampling_clip_{end}"] for end in ("min", "max"))
        rules = trainer_keys("trl_importance")[t["vllm_importance_sampling_mode"]]
        limits = {"reject": {"low": low or 1 / NEVER, "high": high or NEVER}, "truncate": {"high": high}}
        rules = [{"rule": rule, **limits[rule.partition("-")[2]]} for rule in rules]
        t.put_importance(
            rules if t["vllm_importance_sampling_correction"] else [], "vllm_importance_sampling_mode"
        )
    if t["use_peft"] and t["use_rslora"]:
        t.put("model.lora.alpha", t["lora_alpha"] * math.sqrt(t["lora_r"]), "lora_alpha", "use_rslora")
    t.put("optim.betas", [t["adam_beta1"], t["adam_beta2"]], "adam_beta1", "adam_beta2")
    first = t["warmup_steps"] or t["warmup_ratio"] or 0
    first = math.ceil(first * t.settings["steps"][0] * t.updates) if first < 1 else int(first)
    first = 0 if t["lr_scheduler_type"] == "constant" else first  # transformers then has no warm-up
    t.put("optim.warmup_steps", first, "warmup_steps", "warmup_ratio", note=_WARMUP if first else "")
    for setting, name in (("evaluation.every", "eval"), ("checkpoint.every", "save")):
        strategy, every = t[f"{name}_strategy"], t[f"{name}_steps"] or t["logging_steps"]
        if strategy == "epoch" or every < 1:
            t.no_place(f"{name}_strategy", f"set {setting}, in steps")
        else:
            steps = max(1, round(every / t.updates)) if strategy == "steps" else 0
            t.put(setting, steps, f"{name}_strategy", f"{name}_steps")
    if t["use_adaptive_entropy"] and t["entropy_coef"]:
        del t.settings["objective.entropy_bonus"]
        t.no_place("entropy_coef", "the coefficient starts at 0")
    if t["eval_strategy"] not in ("no", False):  # TRL evaluates as it trains
        t.put("evaluation.samples", t["num_generations_eval"] or t["num_generations"], "num_generations_eval")
        t.put("evaluation.temperature", t["temperature"], "temperature")
    _trl_data(t)


_WARMUP = "updates; the first has 1/warmup_steps of the rate, where it is 0 in the other trainer"


def _trl_batch(t: Translation) -> None:
    """Convert completions per device and micro-step to prompts and updates, as `GRPOConfig.__post_init__` does."""
    samples, passes, every = t["num_generations"], t["num_iterations"], t["gradient_accumulation_steps"]
    rows, size = t["per_device_train_batch_size"] * t["num_processes"], t["generation_batch_size"]
    count = t["steps_per_generation"] or (size / rows if size else every)
    steps = count * passes  # micro-steps between two batches of completions
    if size and t["steps_per_generation"]:
        raise ConfigError("generation_batch_size and steps_per_generation: TRL takes one of them")
    if count % 1 or rows * count % samples:
        raise ConfigError(
            f"a batch has {rows} × {count:g} completions (per_device_train_batch_size × num_processes, steps per "
            f"generation), which is no multiple of num_generations = {samples}; TRL refuses that"
        )
    if steps % every and every % steps:
        raise ConfigError(
            f"steps_per_generation × num_iterations = {steps:g} and gradient_accumulation_steps = {every}: an update "
            "would have a part of a batch; take a multiple"
        )
    t.updates = max(1, int(steps) // every)
    prompts = int(rows * count * max(1, every // steps)) // samples
    total = math.ceil(t["max_steps"] / t.updates) if t["max_steps"] > 0 else None
    keys = "per_device_train_batch_size num_processes gradient_accumulation_steps num_generations"
    others = "steps_per_generation num_iterations max_steps num_train_epochs"
    t.put_batch(prompts, passes, total, f"{keys} {others}".split())


def _trl_data(t: Translation) -> None:
    def place(path: str, subset: str | None, split: str | None) -> dict[str, Any]:
        named = {} if path_exists(user_path(path)) else {"subset": subset, "split": split}  # a file has none
        return {"path": path} | {key: value for key, value in named.items() if value}

    name, subset, mixed = t["dataset_name"], t["dataset_config"], t["datasets"] or []
    mixed = [place(item["path"], item.get("name"), item.get("split")) for item in mixed]
    train, test = (
        [place(name, subset, t[f"dataset_{part}_split"])] if name else [] for part in ("train", "test")
    )
    heldout = test if t["eval_strategy"] not in ("no", False) else []
    t.put_data(mixed or train, heldout, "dataset_name", "dataset_name")
    graders, names = [], t["reward_funcs"] or []
    names = [names] if isinstance(names, str) else names
    for function, weight in zip(names, t["reward_weights"] or [1.0] * len(names), strict=True):
        module, _, attribute = function.replace(":", ".").rpartition(".")
        if function == "get_soft_overlong_punishment":
            note = "before sampling.max_tokens; in TRL before 1280"
            t.put("reward.overlong_buffer", 256, "reward_funcs", note=note)
        else:
            graders.append((trainer_keys("rewards").get(function, f"trl:{module}:{attribute}"), weight))
    t.put_rewards(graders, "reward_funcs")


# ---- verl ------------------------------------------------------------------------------------------------------------


def _verl(t: Translation) -> None:
    prompts, samples, passes = t["data.train_batch_size"], t[f"{ROLLOUT}.n"], t[f"{ACTOR}.ppo_epochs"]
    size, steps = min(t[f"{ACTOR}.ppo_mini_batch_size"], prompts), t["trainer.total_training_steps"]
    if prompts % size or samples < 2:
        raise ConfigError(
            f"data.train_batch_size = {prompts} has to be a multiple of ppo_mini_batch_size = {size}, and rollout.n = "
            f"{samples} at least 2: advantages are relative to a group"
        )
    t.updates = prompts // size * passes
    keys = (
        f"data.train_batch_size {ACTOR}.ppo_mini_batch_size {ACTOR}.ppo_epochs trainer.total_training_steps"
    )
    t.put_batch(prompts, passes, steps, [*keys.split(), "trainer.total_epochs"])
    t.put_loss(t[f"{ACTOR}.policy_loss.loss_mode"], f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.")
    key = f"{ACTOR}.optim.lr_warmup_steps"
    first = t[key] if t[key] > 0 else int(t[f"{key}_ratio"] * t.settings["steps"][0])
    updates = t.settings["optim.updates"][0]
    t.put("optim.warmup_steps", first * updates, key, f"{key}_ratio", note=_WARMUP if first else "")
    _verl_importance(t)
    files = [t[f"data.{part}_files"] or [] for part in ("train", "val")]
    train, heldout = (
        [{"path": path} for path in ([item] if isinstance(item, str) else item)] for item in files
    )
    t.put_data(train, heldout, "data.train_files", "data.val_files")
    path, name = (t[f"reward.custom_reward_function.{part}"] for part in ("path", "name"))
    t.put_rewards(
        [(f"verl:{Path(path).stem}:{name}", 1)] if path else [], "reward.custom_reward_function.path"
    )
    unknown = "verl chooses the reward by the column data_source: add --grader NAME, or it is `math`"
    t.missing += [] if path else [unknown]


def _verl_importance(t: Translation) -> None:
    """Set the rules of `algorithm.rollout_correction`; verl's statistic of a rejection is the inverse ratio."""
    rules: list[dict[str, Any]] = []
    rejects, thresholds = (
        str(t[f"{CORRECTION}.{key}"] or "") for key in ("rollout_rs", "rollout_rs_threshold")
    )
    names = {name: rule for rule, name in {**VERL_REJECTIONS, **VERL_WEIGHTS}.items()}
    for name, threshold in zip(rejects.split(","), thresholds.split(","), strict=True) if rejects else ():
        *low, high = map(float, threshold.split("_"))
        rules.append(
            {"rule": names[name]} | ({"low": 1 / high, "high": 1 / low[0]} if low else {"high": high})
        )
    if weight := t[f"{CORRECTION}.rollout_is"]:
        *low, high = map(float, str(t[f"{CORRECTION}.rollout_is_threshold"]).split("_"))
        rules += [{"rule": "token-reject", "low": low[0], "high": high}] if low else []
        rules.append({"rule": names[weight], "high": None if high == NEVER else high})
    if not t[f"{CORRECTION}.bypass_mode"]:
        t.put_importance(rules, f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs")
