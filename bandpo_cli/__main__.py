"""`bandpo` and `python -m bandpo_cli`: run the command line; print errors as one line."""

import atexit
import gc
import os
import signal
import sys
import traceback
from contextlib import nullcontext, suppress
from typing import Any, NoReturn


def _stop_at_once(number: int, frame: Any) -> None:
    os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)


RUN_ERROR, USER_ERROR, INTERRUPTED = 1, 2, 130
"""Exit codes; 130 is 128 + SIGINT, as shells report a program stopped by Ctrl-C."""

_interrupt_handler = signal.getsignal(signal.SIGINT)
if _interrupt_handler is signal.default_int_handler:  # Ctrl-C during the imports would print a traceback
    signal.signal(signal.SIGINT, _stop_at_once)
try:
    import typer

    from bandpo_cli.cli import app
    from bandpo_cli.cli.console import protect_streams
    from bandpo_cli.cli.launch import prints_errors, record_error, silence_other_ranks
    from bandpo_cli.cli.signals import exit_on_sigterm, handle_forwarded_signals
    from bandpo_cli.errors import RunError, UserError, first_line, system_error_message, user_code_location
    from bandpo_cli.processes.ranks import is_main_process, launched_ranks, rank_count
    from bandpo_cli.processes.watch import exit_with_parent, register
finally:
    if _interrupt_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_handler)

PROGRAM = "bandpo"
"""The name in messages and in the scripts of shell completion, also for `python -m bandpo_cli`."""


def main() -> None:
    """Run the command line and exit with code 0 (success), 1 (a run failed), 2 (user error) or 130 (Ctrl-C)."""
    protect_streams()
    if "_BANDPO_COMPLETE" in os.environ:  # a shell asks for completions, by the script of --show-completion
        with suppress(Exception):  # its text would appear within the line that the user types
            app(prog_name=PROGRAM)  # always raises SystemExit
        sys.exit(RUN_ERROR)
    atexit.register(_skip_last_collection)  # the callback registered first runs last
    exit_with_parent()
    silence_other_ranks()
    if launched_ranks() is not None:
        handle_forwarded_signals()
        register(f"rank {os.environ['RANK']}", is_main=is_main_process())
    elif sys.argv[1:2] in (["train"], ["eval"], ["sweep"]):
        register(PROGRAM, leads=True, is_main=is_main_process())
    try:
        _check_utf8(sys.argv[1:])
        with exit_on_sigterm(announce=True) if rank_count() == 1 else nullcontext():
            code = app(standalone_mode=False, prog_name=PROGRAM)
    except UserError as error:
        _fail(error, USER_ERROR)
    except RunError as error:
        _fail(error, RUN_ERROR)
    except typer.TyperException as error:
        if len(sys.argv) == 1:  # no command was given, and the help has been printed
            sys.exit(USER_ERROR)
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        context = getattr(error, "ctx", None)
        command = getattr(context, "command_path", PROGRAM)
        _fail(UserError(f"{_with_setting(message, error, context)} (see {command} --help)"), USER_ERROR)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except Exception as error:
        if known := system_error_message(error):
            _fail(RunError(known), RUN_ERROR)
        if location := user_code_location(error):
            _fail(RunError(f"{type(error).__name__}: {first_line(error)}{location}"), RUN_ERROR)
        record_error(RunError(f"{type(error).__name__}: {error}"), RUN_ERROR, traceback.format_exc())
        if not prints_errors():
            sys.exit(RUN_ERROR)
        raise
    sys.exit(code if isinstance(code, int) else 0)


def _with_setting(message: str, error: Exception, context: Any) -> str:
    """Return the message about an unknown option, if the command has --set with the settings of that name."""
    from bandpo_cli.cli.options import SETTINGS
    from bandpo_cli.config.layers import settings_named
    from bandpo_cli.settings_validation import OPTIONS_ELSEWHERE, option_word, setting_for

    option = getattr(error, "option_name", None)
    known = {flag for parameter in context.command.params for flag in parameter.opts} if context else set()
    if "--set" not in known:  # without a context: an option that lacks its value
        return message
    if option is None:
        word = message.partition("(")[2].partition("=")[0].rstrip(") ")
        if "unexpected extra argument" not in message:
            return message
        uses = f"--set {setting_for(word)}=VALUE" if setting_for(word) else "KEY=VALUE after --set"
        return f"{message}; use {uses}"
    if uses := OPTIONS_ELSEWHERE.get(option_word(option), ""):
        return f"{message.partition(' (')[0]}; use {uses}"
    setting = setting_for(option)
    if flag := next((flag.name for flag in SETTINGS if flag.setting == setting and flag.name in known), None):
        return f"{message.partition(' (')[0]}; use {flag} VALUE"
    forms = ["--set {}=VALUE", *(["--axis {}=VALUE,VALUE"] if "--axis" in known else [])]
    uses = " or ".join(form.format(key) for key in settings_named(option) for form in forms)
    return f"{message.partition(' (')[0]}; use {uses}" if uses else message


def _skip_last_collection() -> None:
    """Keep the interpreter from a last search for unreachable objects, which takes 0.3 s after the imports of `eval`.

    Files, workers and threads are closed by then. Not with torch: vLLM's extension modules print the objects that they
    find undeleted at the end as leaks.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def _check_utf8(words: list[str]) -> None:
    """Raise UserError for bytes on the command line that are not UTF-8, which Python passes on as surrogates."""
    for word in words:
        if any("\ud800" <= char <= "\udfff" for char in word):
            raise UserError(f"{word}: not a text in UTF-8; rename it")


def _fail(error: UserError | RunError, code: int) -> NoReturn:
    """Print an error, or leave that to the process that has started this rank, and exit with `code`."""
    record_error(error, code)
    if prints_errors():
        print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
