"""Python API: the functions behind the commands, without a terminal.

    from bandpo_cli.config.run import RunConfig
    from bandpo_cli.experiments import train

    result = train(RunConfig(steps=2), runs_dir="runs", name="demo")
    print(result.folder, result.status, result.records[-1])

Settings are checked before torch is imported. Mistakes are raised as `errors.UserError`, before anything is written,
failures as `errors.RunError`. Callbacks follow `callbacks.Callback`. Remarks and warnings go to `errors.log`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bandpo_cli.experiments.eval_comparison import compare as compare
    from bandpo_cli.experiments.eval_run import evaluate as evaluate
    from bandpo_cli.experiments.export_import import export_merged as export_merged
    from bandpo_cli.experiments.export_import import export_verl as export_verl
    from bandpo_cli.experiments.export_import import import_verl as import_verl
    from bandpo_cli.experiments.export_import import sync as sync
    from bandpo_cli.experiments.run import fork as fork
    from bandpo_cli.experiments.run import resume as resume
    from bandpo_cli.experiments.run import train as train
    from bandpo_cli.sweeps.sweep_run import sweep as sweep

_MODULES = {
    "compare": "experiments.eval_comparison",
    "evaluate": "experiments.eval_run",
    "export_merged": "experiments.export_import",
    "export_verl": "experiments.export_import",
    "fork": "experiments.run",
    "import_verl": "experiments.export_import",
    "resume": "experiments.run",
    "sweep": "sweeps.sweep_run",
    "sync": "experiments.export_import",
    "train": "experiments.run",
}
"""The module of each function. It is imported when the function is first used, so that a command imports only what it
needs."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"bandpo_cli.{_MODULES[name]}"), name)
