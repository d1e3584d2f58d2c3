"""The command line: a thin shell over the library. Importing it does not import torch."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import click

from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    FingerprintMismatch,
    LockTimeout,
    PlanError,
    UnexpectedCompile,
    UnsafePath,
    UntrustedArtifact,
)

COMMANDS = (
    *("plan", "fingerprint", "warm", "restore", "verify", "explain", "doctor", "publish", "ls"),
    *("tag", "report", "keygen", "sign", "gc", "fsck", "gpu-profile"),
)

DONE, FAULT, USAGE, NOT_WARM, DAMAGED, TIMED_OUT = range(6)
"""Exit codes."""


def exit_code(error: CompileCacheError) -> int:
    """The documented exit code of an error."""
    if isinstance(error, LockTimeout):
        return TIMED_OUT
    if isinstance(error, ChecksumMismatch | UntrustedArtifact | UnsafePath):
        return DAMAGED
    if isinstance(error, UnexpectedCompile | FingerprintMismatch):
        return NOT_WARM
    return USAGE if isinstance(error, PlanError) else FAULT


class _Commands(click.Group):
    """Imports a command's module only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command = getattr(importlib.import_module(f"compilecache.cli.{name}"), name)
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_Commands,
    epilog="Exit codes: 0 done, 1 fault, 2 usage, 3 not warm, 4 damaged or untrusted, 5 timed out.",
)
@click.version_option(package_name="compilecache")
def group() -> None:
    """Compile every shape of a model before training, prove it, and restore it anywhere."""


def main() -> NoReturn:
    """Entry point of ``compilecache``."""
    run_group(group)


def run_group(commands: click.Group) -> NoReturn:
    """Runs a command line: one clear error, never a traceback, and the documented exit codes."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # workloads are named relative to the folder one stands in
    signal.signal(signal.SIGTERM, _terminated)
    code: object = DONE
    try:
        code = commands.main(standalone_mode=False)
    except CompileCacheError as error:
        fail(str(error), exit_code(error), error)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted; finished targets are kept, run the same command again", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(DONE)
    except Exception as error:
        fail(words_of(error), FAULT, error)
    sys.exit(code if isinstance(code, int) else DONE)


def _terminated(_signal: int, _frame: FrameType | None) -> NoReturn:
    # os.write: the signal may have come while standard error was being written to.
    os.write(2, b"error: terminated; finished targets are kept, run the same command again\n")
    raise SystemExit(128 + signal.SIGTERM)


def words_of(error: Exception) -> str:
    """What a person reads of an error that is none of the library's own."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or 'no file named'}"
    return (
        f"unexpected {type(error).__name__}: {error}. Set COMPILECACHE_DEBUG=1 to see where, "
        "and please report it"
    )


def fail(text: str, code: int, error: BaseException | None = None) -> NoReturn:
    """Leaves with one line on standard error; with COMPILECACHE_DEBUG set, with the traceback."""
    if error is not None and os.environ.get("COMPILECACHE_DEBUG"):
        raise error
    print(f"error: {text}", file=sys.stderr)
    sys.exit(code)
