"""Extension points: one table each for methods, divergences, sampling engines, data sets, graders and tasks.

To add one, add one entry to its table, in the module of that name. Settings validation, command-line help, error
messages and the place that builds the thing all read the table. Classes and functions are named as "module:attribute"
and imported on first use, so that this package needs the standard library only: `bandpo --help` imports neither
pydantic nor numpy. What a table has is therefore no class variable of the settings, whose import takes 0.17 s of CPU
time; the help takes 0.25 s in all.

A program that uses the package as a library registers its own entries before it resolves a configuration:

    METHODS.register(MethodEntry("mine", "my bounds", settings="my_module:MySettings", bounds="my_module:my_bounds"))
"""

from bandpo_cli.registries.datasets import DATASETS, Dataset
from bandpo_cli.registries.divergences import DIVERGENCES, DivergenceEntry
from bandpo_cli.registries.engines import ENGINES, EngineEntry
from bandpo_cli.registries.graders import (
    GRADERS,
    SIGNATURES,
    GraderEntry,
    SignatureEntry,
    is_custom_grader,
    split_signature,
)
from bandpo_cli.registries.methods import METHODS, MethodEntry
from bandpo_cli.registries.registry import Entry, Registry, is_function_path, load_attribute, load_function
from bandpo_cli.registries.tasks import (
    DATA_TASK,
    TASKS,
    TaskEntry,
    generated_tasks,
    split_member,
    task_kind,
    tasks_text,
)

__all__ = [
    "DATASETS",
    "DATA_TASK",
    "DIVERGENCES",
    "ENGINES",
    "GRADERS",
    "METHODS",
    "SIGNATURES",
    "TASKS",
    "Dataset",
    "DivergenceEntry",
    "EngineEntry",
    "Entry",
    "GraderEntry",
    "MethodEntry",
    "Registry",
    "SignatureEntry",
    "TaskEntry",
    "generated_tasks",
    "is_custom_grader",
    "is_function_path",
    "load_attribute",
    "load_function",
    "split_member",
    "split_signature",
    "task_kind",
    "tasks_text",
]
