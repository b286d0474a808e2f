"""Permissions of files that other libraries write."""

import subprocess
import sys
from pathlib import Path


def test_apply_umask_gives_the_permissions_of_an_ordinary_file(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, numpy\n"
        "from safetensors.numpy import save_file\n"
        "from bandpo_cli.storage.files import apply_umask\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "save_file({'x': numpy.zeros(1)}, path)\n"
        "apply_umask(path)\n"
    )
    path = tmp_path / "x.safetensors"
    subprocess.run([sys.executable, "-c", code, path], check=True, umask=0o002)
    assert path.stat().st_mode & 0o777 == 0o664
