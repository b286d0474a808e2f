"""`bandpo doctor` with planted packages, with a planted nvidia-smi, and in the environment of the tests."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.cli.eval_command import bandpo, usage_error

Plant = Callable[..., None]

TORCH = """
import warnings
from types import SimpleNamespace

def is_available():
    if {warning!r}:
        warnings.warn({warning!r})
    return {gpus} > 0

version = SimpleNamespace(cuda={cuda!r}, hip=None)
cuda = SimpleNamespace(is_available=is_available, device_count=lambda: {gpus})
"""


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Return a function that installs a package: metadata, and a module of the same name with the code."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(name: str, version: str, needs: tuple[str, ...] = (), code: str = "") -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        extras = sorted({line.split("extra == ")[1].strip("'") for line in needs if "extra == " in line})
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        lines += [f"Requires-Dist: {line}" for line in needs]
        (folder / "METADATA").write_text("\n".join(lines))
        (tmp_path / f"{name}.py").write_text(code)

    return install


def doctor(*arguments: str) -> tuple[int, str]:
    """Run the command, and return its exit code and its output."""
    done = bandpo("doctor", *arguments, cwd=Path.cwd())
    assert done.err == ""
    return done.code, done.out


def test_everything_in_order(plant):
    extras = ("planted-gym==1; extra == 'gym'", "planted-lint>=1; extra == 'dev'")
    plant("bandpo", "9.9", ("plantedone<3,>=1.5", *extras))
    plant("plantedone", "2.15.0+cpu")
    code, out = doctor()
    assert code == 0
    assert "bandpo   9.9, Python 3." in out
    rows = [line.split() for line in out.splitlines()]
    assert ["plantedone", "2.15.0+cpu", ">=1.5,<3"] in rows
    assert ["planted-gym", "optional", "==1"] in rows
    assert not any(word in out for word in ("planted-lint", "problem", "repair"))


def test_versions_outside_the_ranges_and_the_line_that_repairs_them(plant):
    extras = ("plantedengine<3,>=2; extra == 'engine'", "plantedabsent>=1; extra == 'more'")
    needs = ("plantednew<3,>=2", "plantedmissing>=1.5", "plantedold<3,>=1", "plantedfine>=1")
    plant("bandpo", "9.9", (*needs, *extras))
    plant("plantednew", "3.0.1")
    plant("plantedold", "2.9", code="raise ImportError('the problem of the version is reported')")
    plant("plantedfine", "1.0", needs=("PlantedOld<2.5", "plantednew>=9; extra == 'unused'"))
    plant("plantedengine", "1.0")
    code, out = doctor("--format", "json")
    found = json.loads(out)
    assert code == 1
    assert found["problems"] == [
        "plantednew: 3.0.1 is outside the tested range >=2,<3",
        "plantedmissing: not installed",
        "plantedold: 2.9 is installed, plantedfine 1.0 needs <2.5",
        "plantedengine: 1.0 is outside the tested range >=2,<3",
    ]
    assert found["repair"] == (
        'pip install "plantednew>=2,<3" "plantedmissing>=1.5" "plantedengine>=2,<3" "plantedold>=1,<3,<2.5"'
    )


def test_a_package_whose_import_raises_is_one_line(plant):
    """Whatever it raises and prints; the packages after it are imported all the same."""
    names = ("plantedraise", "plantedexit", "plantedlast")
    plant("bandpo", "9.9", names)
    plant("plantedraise", "1.0", code="print('{'); raise RuntimeError('operator missing\\nsecond line')")
    plant("plantedexit", "1.0", code="import sys; sys.exit('no GPU')")
    plant("plantedlast", "1.0", code="import nosuchmodule")
    code, out = doctor()
    assert code == 1
    assert [line for line in out.splitlines() if line.startswith("problem")] == [
        "problem  plantedraise: its import fails: RuntimeError: operator missing second line",
        "problem  plantedexit: its import fails: SystemExit: no GPU",
        "problem  plantedlast: its import fails: ModuleNotFoundError: No module named 'nosuchmodule'",
    ]
    assert "repair" not in out


def test_an_import_that_ends_python_is_reported(plant):
    plant("bandpo", "9.9", ("plantedfirst", "plantedcrash", "plantedlast"))
    plant("plantedfirst", "1.0")
    plant("plantedcrash", "1.0", code="import os; os.abort()")
    plant("plantedlast", "1.0")
    code, out = doctor("--format", "json")
    assert code == 1
    assert json.loads(out)["problems"] == [
        "plantedcrash: its import fails: Python ended with status -6",
        "plantedlast: its import was not tried: Python ended with status -6 before",
    ]


def plant_gpus(plant: Plant, tmp_path: Path, cuda: str | None, gpus: int, warning: str) -> None:
    """Plant torch with that many GPUs, whose availability gives a warning, and the nvidia-smi of two GPUs."""
    plant("bandpo", "9.9", ("torch>=2",))
    plant("torch", "2.15.0", code=TORCH.format(cuda=cuda, gpus=gpus, warning=warning))
    smi = tmp_path / "nvidia-smi"
    rows = ("580.65, NVIDIA H100, 81559 MiB, 80000 MiB", "580.65, NVIDIA H100, 81559 MiB, [N/A]")
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    smi.chmod(0o755)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cuda", "gpus", "warning", "problem"),
    [
        ("13.0", 2, "", None),
        (None, 0, "", "torch cannot use the GPU: it is a build for CPUs"),
        ("13.0", 0, "The NVIDIA driver is too old", "torch cannot use the GPU: The NVIDIA driver is too old"),
    ],
)
def test_gpus(cuda, gpus, warning, problem, plant, tmp_path):
    plant_gpus(plant, tmp_path, cuda, gpus, warning)
    code, out = doctor()
    assert code == (0 if problem is None else 1)
    assert "driver   NVIDIA 580.65\n" in out
    assert "GPU 0    NVIDIA H100, 81559 MiB, 80000 MiB free\n" in out
    assert "GPU 1    NVIDIA H100, 81559 MiB, [N/A] free\n" in out
    assert f"torch    built for {f'CUDA {cuda}' if cuda else 'CPUs'}; GPUs that it can use: {gpus}\n" in out
    problems = [line for line in out.splitlines() if line.startswith("problem")]
    assert problems == ([f"problem  {problem}"] if problem else [])


def test_hidden_gpus_are_no_problem(plant, tmp_path, monkeypatch):
    plant_gpus(plant, tmp_path, "13.0", 0, "hidden")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor()[0] == 0


def test_without_installation_the_message_says_what_to_type(monkeypatch):
    monkeypatch.setattr(metadata, "metadata", mock.Mock(side_effect=metadata.PackageNotFoundError("bandpo")))
    line = usage_error("doctor", cwd=Path.cwd())
    assert line.startswith("error: bandpo is not installed in this environment: type pip install")


@pytest.mark.slow
def test_the_environment_of_the_tests_is_in_order(tmp_path):
    """No package is imported by the command's own process, so its versions are those of the files."""
    command = [sys.executable, "-m", "bandpo_cli", "doctor", "--format", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert (found["problems"], done.returncode, done.stderr) == ([], 0, "")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    assert found["system"]["torch"].startswith(f"built for {build};")
    versions = {package["name"]: package["version"] for package in found["packages"]}
    assert versions["torch"] == torch.__version__
    assert {"transformers", "peft", "mlflow", "vllm", "ray"} <= set(versions)
