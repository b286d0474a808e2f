"""Python API: the functions behind the commands, without a terminal.

    from bandpo_cli.config.run import RunConfig
    from bandpo_cli.experiments import train

    result = train(RunConfig(steps=2), runs_dir="runs", name="demo")
    print(result.folder, result.status, result.records[-1])

Settings are checked before torch is imported. Mistakes are raised as `errors.UserError`, failures of a run as
`errors.RunError`. Callbacks follow `types.Callback`. Remarks and warnings go to the logger `bandpo_cli`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bandpo_cli.experiments.eval_comparison import compare
    from bandpo_cli.experiments.eval_run import evaluate
    from bandpo_cli.experiments.export_folders import export_merged, export_verl
    from bandpo_cli.experiments.resume_run import resume
    from bandpo_cli.experiments.sweep_run import sweep
    from bandpo_cli.experiments.sync_runs import sync
    from bandpo_cli.experiments.train_run import train
    from bandpo_cli.experiments.verl_import import import_verl

_MODULES = {
    "compare": "eval_comparison",
    "evaluate": "eval_run",
    "export_merged": "export_folders",
    "export_verl": "export_folders",
    "import_verl": "verl_import",
    "resume": "resume_run",
    "sweep": "sweep_run",
    "sync": "sync_runs",
    "train": "train_run",
}
"""The module of each function. It is imported when the function is first used, so that a command imports only what it
needs."""

__all__ = [
    "compare",
    "evaluate",
    "export_merged",
    "export_verl",
    "import_verl",
    "resume",
    "sweep",
    "sync",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
