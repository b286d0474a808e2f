"""Options of the commands: the table of flags that stand for a setting, options of several commands, shell completion.

A shell starts `bandpo` for each completion, so the completers read names of files only and import nothing heavy. Where
a completer returns nothing, the shell completes file names.
"""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bandpo_cli.errors import UserError, unknown_choice
from bandpo_cli.methods import METHODS
from bandpo_cli.metric_names import AXES
from bandpo_cli.paths import folders_containing
from bandpo_cli.registries import (
    DATASETS,
    DIVERGENCES,
    ENGINES,
    GRADERS,
    TASKS,
    TEMPLATES,
    TRACKERS,
    generated_tasks,
    load_attribute,
    split_member,
)

RUNS = Path("runs")

Candidates = list[tuple[str, str]]
"""Values, each with a description, which zsh and fish show; '' for none."""

Completer = Callable[[str], Candidates]
"""A function from the beginning of a value to the values that complete it. Typer drops values that do not begin so."""

PLACES = {"run": "config.yaml", "sweep": "sweep.yaml", "evaluation": "eval.json"}
"""The file by which a folder in the runs folder is recognized, by kind."""


def one_of(names: Iterable[str], several: bool = False) -> Completer:
    """Return the completer of an option that takes one of `names`, or `several` separated by commas."""
    entries = names if isinstance(names, Mapping) else dict.fromkeys(names)

    def complete(incomplete: str) -> Candidates:
        before, comma, _ = incomplete.rpartition(",") if several else ("", "", "")
        left = [name for name in entries if name not in before.split(",")]
        return [(f"{before}{comma}{name}", getattr(entries[name], "summary", "")) for name in left]

    return complete


def complete_task(incomplete: str) -> Candidates:
    """Return the tasks and the known data sets; of a task with members, the value that lists them."""
    tasks = {name: TASKS[name] for name in generated_tasks()}.items()
    names = [(f"{name}:list" if task.members else name, task.summary) for name, task in tasks]
    return [*names, *one_of(DATASETS)("")]


def complete_config(incomplete: str) -> Candidates:
    """Return the configuration files of the package by name, and the YAML files in the folder that is typed."""
    folder = incomplete.rpartition("/")[0]
    files = [path.name for path in Path(folder).glob("*.yaml")]
    own = [(f"{folder}/{name}" if folder else name, "") for name in sorted(files)]
    return [*own, *complete_shipped_config(incomplete)]


def complete_shipped_config(incomplete: str) -> Candidates:
    """Return the configuration files of the package by name."""
    from bandpo_cli.config import describe_config, shipped_configs

    return [(name, describe_config(path)) for name, path in shipped_configs().items()]


def folder_of(*kinds: str) -> Callable[[typer.Context, str], Candidates]:
    """Return the completer of names in --runs-dir of these keys of `PLACES`; a run of a sweep is `sweep/run`."""

    def complete(context: typer.Context, incomplete: str) -> Candidates:
        root = Path(context.params.get("runs_dir") or "runs")
        names = [(name, kind) for kind in kinds for name in folders_containing(root, PLACES[kind])]
        if "run" in kinds:
            for sweep in folders_containing(root, PLACES["sweep"]):
                runs = folders_containing(root / sweep, PLACES["run"])
                names += [(f"{sweep}/{name}", "run") for name in runs]
        return sorted(names)

    return complete


def option(
    metavar: str | None = None,
    default: str | None = None,
    flags: Sequence[str] = (),
    complete: Callable[..., Any] | None = None,
    **more: Any,
) -> Any:
    """Return an option of a command, for the annotation of a parameter; `documented` adds its help text.

    `metavar` is the name of the value in the help, and `default` the text of the default there. `flags` are given if
    they differ from the parameter's name. `more` are further arguments of `typer.Option`.
    """
    more |= {"metavar": metavar, "show_default": default or True, "autocompletion": complete}
    return typer.Option(*flags, **more)


def argument(
    metavar: str, default: str | None = None, complete: Callable[..., Any] | None = None, **more: Any
) -> Any:
    """Return a positional argument of a command; see `option`."""
    return typer.Argument(metavar=metavar, show_default=default or True, autocompletion=complete, **more)


def documented(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a command with the texts of its section `Args` as the help of its options.

    An option of the type bool is a flag without a value, and has no opposite.
    """
    about, _, section = inspect.cleandoc(command.__doc__ or "").partition("\n\nArgs:\n")
    # The console wraps prose; examples keep their lines.
    about = re.sub(r"(?<=.)\n(?=[^\n\[])", " ", about)
    command.__doc__ = about.replace("[/bold]  ", "[/bold]  # ")
    command.__annotations__ = inspect.get_annotations(command, eval_str=True)
    for name, text in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", section, re.MULTILINE):
        command.__annotations__[name].__metadata__[0].help = " ".join(text.split())
    for name, annotation in command.__annotations__.items():
        if getattr(annotation, "__origin__", None) is bool:
            flag = annotation.__metadata__[0]
            flag.param_decls, flag.metavar = (f"--{name.strip('_').replace('_', '-')}",), ""
    return command


_PANELS: dict[str, tuple[str, ...]] = {
    "Options": (),
    "Compared values": ("seeds", "axis", "recorded", "tuned_on", "baseline"),
    "Execution": ("jobs", "gpus_per_run", "stop_behind", "executor", "ray_address", "nproc"),
    "Model": ("model",),
    "Data": ("task", "samples", "evaluation.problems"),
    "Sampling": ("sampling", "evaluation", "n", "k"),
    "Method": ("bounds",),
    "Optimization": ("optim",),
    "Tracking": ("tracking",),
}
"""The panels of the help and their settings, sections of settings and parameters, in the order of docs/settings.md."""


_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names}


@dataclass(frozen=True, eq=False)
class Flag:
    """A flag of `train`, `sweep` or `eval` that stands for one setting."""

    name: str
    setting: str
    kind: Any  # the type of the value, or a function from its text to the value that raises ValueError
    help: str
    default: str | None = None  # the text in the help
    metavar: str | None = None
    names: Iterable[str] = ()  # the values that a shell completes
    sweep: Literal["several values", "one value", "no flag"] = "one value"  # what `bandpo sweep` takes
    convert: Callable[[Any], Any] | None = (
        None  # from the value to the setting; None if it is the value itself
    )
    more: dict[str, Any] = field(default_factory=dict)  # further arguments of `typer.Option`

    def option(self, command: str) -> inspect.Parameter:
        """Return the parameter of a command's function from which Typer makes the option."""
        several = self.sweep == "several values"
        kind: Any = str if several else self.kind
        more = {"metavar": self.metavar, "default": self.default, "help": self.help, **self.more}
        if several and command == "sweep":
            initial = (self.metavar or "VALUE")[0]
            more |= {"metavar": f"{initial},{initial}", "default": None}
        if self.names:
            more["complete"] = one_of(self.names, several and command == "sweep")
        form = {"default": None, "annotation": Annotated[kind | None, option(flags=[self.name], **more)]}
        name = self.name.partition("/")[0].removeprefix("--").replace("-", "_")
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **form)

    def read(self, value: Any, command: str) -> Any:
        """Return the setting for the value of the option. The values of a sweep stay one text."""
        from bandpo_cli.config.layers import split_values

        if self.sweep != "several values" or command == "sweep":
            return self.convert(value) if self.convert else value
        given = f"{self.name} {value}"
        if len(split_values(value)) > 1:
            raise UserError(f"{given}: train takes one value; bandpo sweep {given} compares several")
        try:
            return self.kind(value)
        except ValueError:
            expected = {int: "an integer", float: "a number"}.get(self.kind, "a value in JSON")
            raise UserError(f"{given}: {expected} is expected") from None


def print_members(tasks: Iterable[str]) -> None:
    """Print the members of a task and exit if one of the values of `--task` is TASK:list."""
    for task, member in filter(None, map(split_member, tasks)):
        if member == "list":
            from bandpo_cli.config.task import check_package

            check_package(TASKS[task])
            members = load_attribute(str(TASKS[task].members))()
            width = max(map(len, members))
            typer.echo("\n".join(f"{name:{width}}  {text}".rstrip() for name, text in members.items()))
            raise typer.Exit


def _read_task(values: list[str]) -> dict[str, Any]:
    from bandpo_cli.config.task import task_from_arguments

    print_members(values)
    return task_from_arguments(values)


def split_commas(texts: Iterable[str]) -> list[str]:
    """Return the values of an option that may be repeated or hold several values separated by commas."""
    return [value.strip() for text in texts for value in text.split(",")]


# fmt: off
_REGION_METHODS = METHODS.names_text([name for name, method in METHODS.items() if method.trust_region])
_SAMPLER = Flag("--sampler", "sampling.engine", str, f"{ENGINES.names_text()}.", "auto", "ENGINE",
                names=["auto", *ENGINES])
_GRADER = Flag("--grader", "task.grader", str, f"Grader: {GRADERS.names_text()}.", "the grader of the data set", "NAME",
               names=GRADERS, sweep="no flag")
_TEMPLATE = Flag("--template", "task.template", str,
                 f"User message: {', '.join(TEMPLATES)}, or a text that contains {{question}}.", "answer-line",
                 "NAME|TEXT", names=TEMPLATES)
_DETERMINISTIC = Flag("--deterministic", "deterministic", bool, "The same bits in every run on the same GPU; slower.",
                      metavar="")

_MEMBERS = ":NAME (repeatable; {}:list prints the names)"
_GENERATED = [name + (_MEMBERS.format(name) if TASKS[name].members else "") for name in generated_tasks()]
TASKS_TEXT = f"{', '.join(_GENERATED)}, a known data set ({', '.join(DATASETS)})"
"""What `--task` accepts beside files, for a help text."""
TASK_NAMES = [*generated_tasks(), *DATASETS]

SETTINGS = (
    Flag("--method", "bounds.method", str, f"Policy loss: {METHODS.names_text()}; grpo and ppo mean clip.", "band",
         "METHOD", names=METHODS, sweep="several values"),
    Flag("--divergence", "bounds.divergence", str,
         f"Trust region of {_REGION_METHODS}: {DIVERGENCES.names_text()}.", "kl",
         "DIVERGENCE", names=DIVERGENCES, sweep="several values"),
    Flag("--delta", "bounds.delta", float, "Radius of the trust region.", "0.05", "RADIUS", sweep="several values"),
    Flag("--model", "model.path", str,
         "Hugging Face model folder or hub id. For train also RUN or RUN@STEP: a checkpoint and its run's settings.",
         "the bundled model", "MODEL", sweep="several values"),
    Flag("--task", "task", list[str],
         f"Problems to train on: {TASKS_TEXT}, or a .jsonl, .json, .csv or .parquet file of questions and answers.",
         "countdown", "NAME|FILE", convert=_read_task, more={"complete": complete_task}),
    _TEMPLATE,
    _GRADER,
    Flag("--lr", "optim.lr", float, "Peak learning rate.", "5e-5 for the bundled model, else 1e-6", "RATE",
         sweep="several values"),
    Flag("--max-tokens", "sampling.max_tokens", int, "Maximum number of tokens per completion.",
         "1024; for countdown 8, or 32 with another model; for calculator 48", "N", sweep="several values"),
    _SAMPLER,
    Flag("--steps", "steps", int, "Batches of rollouts per run.", "100", "N"),
    Flag("--seed", "seed", int, "Seed of every random choice.", "0", "N", sweep="no flag"),
    _DETERMINISTIC,
    Flag("--tracker", "tracking.trackers", list[str],
         f"Tracker that gets a copy of the run: {TRACKERS.names_text()}; repeatable, or several separated by commas.",
         "mlflow", "NAME", names=TRACKERS, convert=split_commas),
    Flag("--callback", "tracking.callbacks", list[str], "A callback of your own; repeatable.", None, "module:Class"),
)
"""The flags of `train` and `sweep`. A flag for another setting is one more entry here."""

EVAL_SETTINGS = (
    Flag("--temperature", "evaluation.temperature", float, "Sampling temperature; 0 is greedy, with --n 1.",
         "the run's, else 1", "T"),
    Flag("--max-tokens", "sampling.max_tokens", int, "Maximum number of tokens per completion.",
         "the run's, else 1024; for countdown 8 or 32, for calculator 48", "N", more={"min": 1}),
    _SAMPLER,
    Flag("--limit", "evaluation.problems", int,
         "Maximum number of problems per set. The sample is random but the same in every run.", None, "N",
         more={"min": 1}),
    Flag("--seed", "seed", int, "Seed of the sampling.", "the run's, else 0", "N"),
    _DETERMINISTIC,
    _TEMPLATE,
    _GRADER,
)
"""The flags of `eval` that stand for a setting."""

TRACKING_SETTINGS = (
    Flag("--tracking-uri", "tracking.uri", str, "MLflow server or store.",
         "$MLFLOW_TRACKING_URI, else mlflow.db in --runs-dir", "URI"),
    Flag("--mlflow/--no-mlflow", "tracking.mlflow", bool, "Send metrics to MLflow.", "as --tracker", ""),
    Flag("--stall-after", "tracking.stall_after", float,
         "Report what does not answer for so long, in seconds; 0 reports nothing.", "600", "SECONDS", more={"min": 0}),
)
"""The flags of the section `tracking`, of all three commands."""
# fmt: on

Settings = Annotated[dict[str, Any], SETTINGS]
EvalSettings = Annotated[dict[str, Any], EVAL_SETTINGS]
Tracking = Annotated[dict[str, Any], TRACKING_SETTINGS]


def takes_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a command with the options of flags in place of a parameter such as `settings: Settings`.

    The function gets the settings that were given on the command line, by dotted name.
    """
    command = function.__name__
    panels: dict[str, list[inspect.Parameter]] = {key: [] for key in _PANELS}
    groups: dict[str, dict[str, Flag]] = {}  # by parameter of the function and of the command
    for name, parameter in inspect.signature(documented(function)).parameters.items():
        flags: Any = getattr(parameter.annotation, "__metadata__", (None,))[0]
        if isinstance(flags, tuple):
            taken = [flag for flag in flags if command != "sweep" or flag.sweep != "no flag"]
            options = {flag.setting: flag.option(command) for flag in taken}
            groups[name] = {options[flag.setting].name: flag for flag in taken}
        else:
            options = {name: parameter}
        for key, item in options.items():
            panel = _PANEL_OF.get(key) or _PANEL_OF.get(key.partition(".")[0], "Options")
            if panel != "Options":  # other commands share the options of this panel
                item.annotation.__metadata__[0].rich_help_panel = panel
            panels[panel].append(item)
    parameters = [parameter for panel in panels.values() for parameter in panel]

    @functools.wraps(function)
    def run(**values: Any) -> Any:
        for name, flags in groups.items():
            given = {key: value for key in flags if (value := values.pop(key)) is not None}
            settings = {flags[key].setting: flags[key].read(value, command) for key, value in given.items()}
            grader = settings.get("task.grader")
            if command == "train" and grader is not None and grader in GRADERS and GRADERS[grader].is_control:
                # The grader of the answers stays, and decides what is correct.
                settings["task.rewards"] = [{"weight": 0}, settings.pop("task.grader")]
            values[name] = settings
        return function(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def refuse_with(context: typer.Context, flag: str, why: str, is_refused: Callable[[str], bool]) -> None:
    """Raise UserError if options, or arguments by their name in the help, were given that `flag` makes meaningless."""
    given = []
    for parameter in context.command.params:
        if getattr(context.get_parameter_source(parameter.name or ""), "name", None) == "COMMANDLINE":
            is_off = context.params.get(parameter.name) is False  # of --mlflow/--no-mlflow
            names = (is_off and parameter.secondary_opts) or parameter.opts
            flags = [name for name in names if name.startswith("--")]
            given.append(flags[0] if flags else (parameter.metavar or "").strip("[]"))
    if refused := [*filter(is_refused, given)]:
        raise UserError(f"{flag}: {why}; leave out {', '.join(refused)}")


def check_choice(flag: str, value: str, allowed: Collection[str]) -> str:
    """Return `value` if it is one of `allowed`, else raise a UserError."""
    if value not in allowed:
        raise UserError(f"{flag} {value}: {unknown_choice(value, allowed)}")
    return value


def choice(flag: str, *allowed: str, metavar: str = "FORMAT", help: str | None = None) -> Any:
    """Return an option whose value is one of `allowed`; they are the help text if there is no other."""

    def check(value: str | None) -> str | None:
        return None if value is None else check_choice(flag, value.lower(), allowed)

    text = help or f"{', '.join(allowed[:-1])} or {allowed[-1]}."
    return option(metavar, flags=[flag], complete=one_of(allowed), callback=check, help=text)


GROUP: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""Arguments of `typer.Typer` for an application with commands, such as those of `export`."""


_CONFIG_HELP = "YAML config file, or a name of `bandpo configs`; repeatable, later files win."
_SET_HELP = "Any setting, as section.key=value; repeatable."
_RUNS_DIR_HELP = "Where runs, evaluations, sweeps and the MLflow store are kept."
_NPROC_HELP = "Number of processes on this machine. On a machine with GPUs each process has its own GPU."

ConfigFiles = Annotated[
    list[Path] | None, option("FILE", flags=["--config", "-c"], complete=complete_config, help=_CONFIG_HELP)
]
Assignments = Annotated[list[str] | None, option("KEY=VALUE", flags=["--set"], help=_SET_HELP)]
RunsDir = Annotated[Path, option("FOLDER", help=_RUNS_DIR_HELP)]
TableOrJson = Annotated[str, choice("--format", "table", "json")]
AxisName = Annotated[str, choice("--x", *AXES, metavar="AXIS", help=f"Axis of compute: {', '.join(AXES)}.")]
Nproc = Annotated[int | None, option("N", "1", min=1, help=_NPROC_HELP)]
