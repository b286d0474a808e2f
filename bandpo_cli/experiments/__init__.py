"""Python API: what the commands do, without a terminal.

    from bandpo_cli.config.run import RunConfig
    from bandpo_cli.experiments import train

    result = train(RunConfig(steps=2), runs_dir="runs", name="demo")
    print(result.folder, result.status, result.records[-1])

Settings are checked before torch is imported. Mistakes are raised as `errors.UserError`, failures of a run as
`errors.RunError`. Callbacks follow `types.Callback`. Remarks and warnings go to the logger `bandpo_cli`.
"""

from bandpo_cli.experiments.compare import compare
from bandpo_cli.experiments.evaluate import evaluate
from bandpo_cli.experiments.export import export_verl
from bandpo_cli.experiments.import_verl import import_verl
from bandpo_cli.experiments.resume import resume
from bandpo_cli.experiments.sweep import sweep
from bandpo_cli.experiments.sync import sync
from bandpo_cli.experiments.train import train

# The functions replace the submodules of the same name as attributes of this package; `import_module` finds those.
__all__ = ["compare", "evaluate", "export_verl", "import_verl", "resume", "sweep", "sync", "train"]
