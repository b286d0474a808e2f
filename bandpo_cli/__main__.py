"""`bandpo` and `python -m bandpo_cli`: the commands, their exit codes, and errors as one line.

Modules of commands are light: heavy imports are inside the command functions.
"""

import atexit
import gc
import os
import re
import signal
import sys
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

RUN_ERROR, USER_ERROR, INTERRUPTED = 1, 2, 130
"""Exit codes; 130 is 128 + SIGINT, as shells report a program stopped by Ctrl-C."""


def _stop_at_once(number: int, frame: Any) -> None:
    os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)


_interrupt_handler = signal.getsignal(signal.SIGINT)
if _interrupt_handler is signal.default_int_handler:  # Ctrl-C during the imports would print a traceback
    signal.signal(signal.SIGINT, _stop_at_once)
try:
    import typer
    from typer.core import TyperGroup

    from bandpo_cli import __version__
    from bandpo_cli.cli.bounds import bounds
    from bandpo_cli.cli.console import open_console, protect_streams
    from bandpo_cli.cli.doctor import configs_app, doctor
    from bandpo_cli.cli.eval import eval_app
    from bandpo_cli.cli.export import export_app, import_app, sync
    from bandpo_cli.cli.launch_and_watch_ranks import record_error, silence_other_ranks
    from bandpo_cli.cli.options import GROUP, SETTINGS
    from bandpo_cli.cli.report import report
    from bandpo_cli.cli.runs import plot, runs, samples, show, view
    from bandpo_cli.cli.signals import exit_on_sigterm, handle_forwarded_signals
    from bandpo_cli.cli.sweep import sweep
    from bandpo_cli.cli.train import train
    from bandpo_cli.errors import RunError, UserError, first_line, system_error_message, user_code_location
    from bandpo_cli.processes.ranks import is_main_process, launched_ranks, rank_count
    from bandpo_cli.processes.watch import PARENT_PID_VARIABLE, exit_with_parent, register
finally:
    if _interrupt_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_handler)

PROGRAM = "bandpo"
"""The name in messages and in the scripts of shell completion, also for `python -m bandpo_cli`."""


class _Root(TyperGroup):
    """The command group `bandpo`. Its help lists the options of shell completion last."""

    def get_params(self, ctx: Any) -> list[Any]:
        return sorted(super().get_params(ctx), key=lambda option: option.name.endswith("_completion"))


app = typer.Typer(**GROUP, name=PROGRAM, cls=_Root, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(context: typer.Context, asked: bool) -> None:
    if asked and not context.resilient_parsing:  # resilient: a shell completes a later word
        from bandpo_cli.storage.run_record import git_state

        root, commit = Path(__file__).parents[1], ""
        if (root / ".git").exists() and (state := git_state(root)):  # a checkout, and no wheel in another one
            commit = f" (commit {state['commit'][:7]}{', with local changes' if state['dirty'] else ''})"
        print(f"bandpo {__version__}{commit}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Reinforcement learning of language models with Band-constrained Policy Optimization."""


# In the order of the help.
app.command()(train)
app.add_typer(eval_app, name="eval")
for command in (sweep, report, runs, show, samples, view, plot, sync, bounds):
    app.command()(command)
app.add_typer(export_app, name="export")
app.add_typer(import_app, name="import")
app.add_typer(configs_app, name="configs")
app.command()(doctor)


def main() -> None:
    """Run the command line and exit with code 0 (success), 1 (a run failed), 2 (user error) or 130 (Ctrl-C)."""
    protect_streams()
    if "_BANDPO_COMPLETE" in os.environ:  # a shell asks for completions, by the script of --show-completion
        with suppress(Exception):  # its text would appear within the line that the user types
            app(prog_name=PROGRAM)  # always raises SystemExit
        sys.exit(RUN_ERROR)
    atexit.register(_skip_last_collection)  # the callback registered first runs last
    if PARENT_PID_VARIABLE in os.environ:
        exit_with_parent()
    if (ranks := rank_count()) > 1:
        silence_other_ranks()
    if launched_ranks() is not None:
        handle_forwarded_signals()
        register(f"rank {os.environ['RANK']}", is_main=is_main_process())
    elif sys.argv[1:2] in (["train"], ["eval"], ["sweep"]):
        register(PROGRAM, leads=True, is_main=is_main_process())
    try:
        # Python passes bytes that are not UTF-8 as surrogates.
        if words := [word for word in sys.argv if re.search("[\ud800-\udfff]", word)]:
            raise UserError(f"{words[0]}: not a text in UTF-8; rename it")
        with exit_on_sigterm(announce=True) if ranks == 1 else nullcontext():
            code = app(standalone_mode=False, prog_name=PROGRAM)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except Exception as error:
        if isinstance(error, typer.TyperException) and len(sys.argv) == 1:  # the help has been printed
            sys.exit(USER_ERROR)
        known = _known_error(error)
        code = USER_ERROR if isinstance(known, UserError) else RUN_ERROR
        trace = "" if known else traceback.format_exc()
        record_error(known or RunError(f"{type(error).__name__}: {error}"), code, trace)
        if is_main_process() and launched_ranks() is None:  # the parent of launched ranks prints their error
            if known is None:
                raise
            open_console(stderr=True).print_line(str(known), "error:", "red")
    sys.exit(code if isinstance(code, int) else 0)


def _skip_last_collection() -> None:
    """Keep the interpreter from a last search for unreachable objects, which takes 0.3 s after the imports of `eval`.

    Not with torch: vLLM's extension modules print the objects that they find undeleted at the end as leaks.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def _known_error(error: Exception) -> UserError | RunError | None:
    """Return the error to print as one line; None for a mistake in this package, which needs its traceback."""
    if isinstance(error, UserError | RunError):
        return error
    if isinstance(error, typer.TyperException):
        return UserError(_usage_message(error))
    if message := system_error_message(error):
        return RunError(message)
    if location := user_code_location(error):
        return RunError(f"{type(error).__name__}: {first_line(error)}{location}")
    return None


def _usage_message(error: typer.TyperException) -> str:
    """Return the message about a wrong command line, with the flag or the setting that an unknown option may mean."""
    from bandpo_cli.config.layers import settings_named
    from bandpo_cli.methods import METHODS, method_name
    from bandpo_cli.settings_validation import meaning_of

    message, context = error.format_message(), getattr(error, "ctx", None)
    message = re.sub("Input should be a valid integer.*", "expected an integer", message)
    option = getattr(error, "option_name", "")
    known = {flag for parameter in context.command.params for flag in parameter.opts} if context else set()
    advice = ""
    if (name := re.match(r"No such command '([\w-]+)'", message)) and method_name(name[1].lower()) in METHODS:
        message, advice = name[0], f"bandpo train --method {name[1].lower()}"
    if "--set" in known and option:
        setting, typed = meaning_of(option)
        flags = [flag.name for flag in SETTINGS if flag.setting == setting and flag.name in known]
        forms = ["--set {}=VALUE", *(["--axis {}=VALUE,VALUE"] if "--axis" in known else [])]
        advice = (
            typed
            or " or ".join(f"{flag} VALUE" for flag in flags)
            or " or ".join(form.format(key) for key in settings_named(option) for form in forms)
        )
        if advice:  # without the options that Typer finds similar
            message = message.partition(" (")[0]
    elif "--set" in known and "unexpected extra argument" in message:
        word = message.partition("(")[2].partition("=")[0].rstrip(") ")
        setting, typed = meaning_of(word)
        advice = f"--set {setting}=VALUE" if setting else typed or "KEY=VALUE after --set"
    uses = f"; use {advice}" if advice else ""
    return f"{message}{uses} (see {context.command_path if context else PROGRAM} --help)"


if __name__ == "__main__":
    main()
