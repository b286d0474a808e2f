"""Python API: what the commands do, without a terminal.

    from bandpo_cli.config.run import RunConfig
    from bandpo_cli.experiments import train

    result = train(RunConfig(steps=2), runs_dir="runs", name="demo")
    print(result.folder, result.status, result.records[-1])

Settings are checked before torch is imported. Mistakes are raised as `errors.UserError`, failures of a run as
`errors.RunError`. Callbacks follow `types.Callback`. Remarks and warnings go to the logger `bandpo_cli`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bandpo_cli.experiments.compare import compare
    from bandpo_cli.experiments.evaluate import evaluate
    from bandpo_cli.experiments.export_merged import export_merged
    from bandpo_cli.experiments.export_verl import export_verl
    from bandpo_cli.experiments.import_verl import import_verl
    from bandpo_cli.experiments.resume import resume
    from bandpo_cli.experiments.sweep import sweep
    from bandpo_cli.experiments.sync import sync
    from bandpo_cli.experiments.train import train

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


class _Package(ModuleType):
    """This package: each function is imported from the submodule of the same name when it is first used.

    A command then imports only what it needs. As attributes of the package, the names are always the functions;
    `import_module` returns the submodules.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{name}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import of a submodule binds it to its name in the package, where it would hide the function.
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
