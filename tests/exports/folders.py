"""A small experiment, and what the run.sh of an exported folder calls."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bandpo_cli.config.layers import Layer, resolve
from bandpo_cli.config.run import RunConfig

SMALL = {
    "task": {"max_number": 5, "numbers": 3},
    "sampling": {"prompts": 8, "samples": 4},
    "optim": {"updates": 2, "warmup_steps": 0},
    "evaluation": {"problems": 10},
}


def small(*layers: Layer, **sections: Any) -> RunConfig:
    """Return the configuration of a small experiment with further settings."""
    return resolve([SMALL, *layers, sections])


def run_script(folder: Path, *arguments: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment with which run.sh calls Python."""
    programs = folder.parent / "programs"
    programs.mkdir(exist_ok=True)
    stub = programs / "python3"
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    stub.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    stub.chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW", "VERL"))}
    clean |= {"PATH": f"{programs}:{os.environ['PATH']}", **environment}
    output = subprocess.check_output([folder / "run.sh", *arguments], env=clean, cwd="/", text=True)
    words, variables = json.loads(output)
    return words, variables
