"""Export of a run's policy as a plain model folder, with the adapters of LoRA merged into its weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.config.run import ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.experiments.memory import out_of_memory_errors
from bandpo_cli.experiments.preflight import ModelRef, resolve_model
from bandpo_cli.paths import is_adapter_folder, path_exists, user_path
from bandpo_cli.storage.files import apply_umask, export_folder, sync_file, sync_folder


def export_merged(model: str, out: Path | str, runs_dir: Path | str = "runs") -> Path:
    """Write a model folder that transformers and vLLM load: the policy of a run, or a model with an adapter.

    Adapters are merged into the weights as they are for the sampler during training. Of a run that trains all weights,
    the files of the checkpoint are copied. The folder is either complete or absent.

    Args:
        model: a run (NAME or NAME@STEP), or an adapter folder in the format of peft.
        out: the folder; it must not exist.
        runs_dir: the folder of run folders.

    Raises:
        UserError: there is no such run or folder, the adapter or its base model cannot be loaded, or `out` exists or
            cannot be written.
        RunError: there is not enough memory for the model.
    """
    out = Path(out)
    if path_exists(out) or out.is_symlink():
        raise UserError(f"--out {out}: exists already; name a new folder")
    ref = resolve_model(model, Path(runs_dir), "RUN")
    source = user_path(ref.path)
    is_adapter = is_adapter_folder(source)
    if not is_adapter and ref.run is None:
        raise UserError(
            f"RUN {model[:200]}: neither a run nor an adapter folder; name a run (or RUN@STEP), or a folder with an "
            "adapter: a complete model has nothing to merge"
        )
    with export_folder(out) as folder:
        if is_adapter:
            _write_merged(ref, source, folder)
        else:
            for path in source.iterdir():
                if path.is_file():
                    shutil.copy2(path, folder)
        for path in folder.iterdir():
            apply_umask(path)
            sync_file(path)
        sync_folder(folder)
    return out


def _write_merged(ref: ModelRef, adapter: Path, folder: Path) -> None:
    """Load the base model with its adapter on the CPU and write it to `folder`, in the dtype of the run."""
    layers = [] if ref.run is None else [read_layer(ref.run.path / "config.yaml")]
    trained = resolve(layers)
    with out_of_memory_errors(trained, training=False):
        from bandpo_cli.models.load import load_policy, save_policy

        overrides = {
            "path": str(adapter),
            "revision": None,
            "device": "cpu",
            "attention": "auto",
            "lora": None,
        }
        settings = trained.model.model_copy(update=overrides)
        if ref.run is None:
            settings = settings.model_copy(update={"dtype": _stored_dtype(settings, adapter)})
        save_policy(load_policy(settings, for_training=False), folder)


def _stored_dtype(settings: ModelConfig, adapter: Path) -> Literal["float32", "bfloat16"]:
    """Return the dtype in which the base model of an adapter is stored; float32 for any but bfloat16."""
    from bandpo_cli.models.adapter_files import base_config
    from bandpo_cli.models.load import read_config

    dtype = read_config(base_config(settings, adapter)).dtype
    return "bfloat16" if str(dtype) == "torch.bfloat16" else "float32"
