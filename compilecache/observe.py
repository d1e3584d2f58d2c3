"""Runs a command as it is and learns from it which shapes it feeds its compiled modules.

Every Python process below the command finds ``observe_site/sitecustomize.py`` first, and keeps a
file of its own with what it saw, so a killed process loses nothing. Here those files become plans.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from compilecache.documents import read_json
from compilecache.errors import PlanError
from compilecache.shapes import Argument, InputSpec, Phase, ShapePlan

DIRECTORY_VARIABLE = "COMPILECACHE_OBSERVE_DIR"
SITE = Path(__file__).with_name("observe_site")

_PASSED_ON = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
        signal.SIGCONT,
    }
)
_FROM_KERNEL = 0x80
"""``si_code`` of a signal that a terminal sent: the whole foreground group already has it."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a run fed its compiled functions."""

    exit_code: int
    """The command's own; 128 + n when signal n ended it."""
    plans: Mapping[str, ShapePlan]
    """A plan for every module or function seen, by its name ``module:Class``."""
    faults: tuple[str, ...] = ()
    """What could not be recorded, and why."""


class _Call(BaseModel):
    """One kind of call, as the recorder wrote it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: str
    function: str
    phase: Phase
    dtype: str
    devices: tuple[str, ...]
    arguments: dict[str, Argument]
    positional: int = 0
    opaque: dict[str, str]
    count: int
    spec: InputSpec | None = None
    workload: str | None = None
    settings: dict[str, JsonValue] = {}


class _Record(BaseModel):
    """What one process saw."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    pid: int
    argv: tuple[str, ...]
    calls: tuple[_Call, ...]
    faults: tuple[str, ...]


def observe(command: Sequence[str]) -> Observation:
    """Runs the command with its own stdin, stdout and stderr, and returns when it ended.

    Signals are passed on. Raises PlanError for a command that cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="compilecache-observe-") as directory:
        exit_code = _run(command, _environment(Path(directory)))
        records, faults = _read(Path(directory))
    plans, unplanned = _plans(records)
    return Observation(exit_code, MappingProxyType(plans), (*faults, *unplanned))


def plan_files(plans: Mapping[str, ShapePlan], output: Path) -> dict[Path, ShapePlan]:
    """Where to write each: ``output`` for one plan, ``output-<name>`` with its suffix for several."""
    if len(plans) == 1:
        return dict.fromkeys([output], next(iter(plans.values())))
    short = [name.rpartition(":")[2] for name in plans]
    files = {}
    for name, plan in plans.items():
        last = name.rpartition(":")[2]
        unique = last if short.count(last) == 1 else name
        safe = re.sub(r"[^\w.]+", "-", unique).strip("-")
        files[output.with_name(f"{output.stem}-{safe}{output.suffix}")] = plan
    return files


def _environment(directory: Path) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH", "")
    site = f"{SITE}{os.pathsep}{path}" if path else str(SITE)
    return {**os.environ, "PYTHONPATH": site, DIRECTORY_VARIABLE: str(directory)}


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    with _blocked() as before:
        try:
            child = os.posix_spawnp(command[0], list(command), dict(environment), setsigmask=before)
        except OSError as error:
            raise PlanError(
                f"command '{command[0]}' cannot be run: {error.strerror or error}",
                next_step="Write it after '--' as you would type it: -- python train.py",
                field="command",
            ) from error
        status = _wait(child)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


@contextmanager
def _blocked() -> Iterator[set[int]]:
    """Signals wait to be passed on instead of ending this process. Yields the mask from before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    try:
        yield {int(number) for number in before}
    finally:
        # One that came too late to be passed on must not end this process before it wrote the plan.
        while signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(child: int) -> int:
    """The child's wait status, once it has ended; until then signals are passed on to it."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done == child:
            return status
        # The timeout is for a SIGCHLD that went to another thread.
        info = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, 1.0)
        if info is None or info.si_signo == signal.SIGCHLD or info.si_code == _FROM_KERNEL:
            continue
        with suppress(ProcessLookupError):
            os.kill(child, info.si_signo)


def _read(directory: Path) -> tuple[list[_Record], list[str]]:
    records, faults = list[_Record](), list[str]()
    for path in sorted(directory.glob("*.json")):
        try:
            record = _Record.model_validate(read_json(path.read_bytes()))
        except (OSError, ValueError, ValidationError) as error:
            faults.append(f"the record {path.name} cannot be read: {' '.join(str(error).split())}")
            continue
        records.append(record)
        faults.extend(f"process {record.pid}: {fault}" for fault in record.faults)
    return records, faults


def _plans(records: Sequence[_Record]) -> tuple[dict[str, ShapePlan], list[str]]:
    """A plan for each subject, its specs in the order they were met."""
    # Not the whole command line: a plan is committed, and an argument may be a secret.
    programs = ", ".join(dict.fromkeys(Path(r.argv[0]).name for r in records if r.argv))
    calls: dict[str, list[_Call]] = {}
    unplanned: dict[str, None] = {}
    for call in (call for record in records for call in record.calls):
        if call.spec is not None or not call.opaque:
            calls.setdefault(call.subject, []).append(call)
        else:
            unplanned[_why_not(call)] = None
    plans = {subject: _plan(subject, seen, programs) for subject, seen in calls.items()}
    return plans, list(unplanned)


def _why_not(call: _Call) -> str:
    arguments = ", ".join(f"{name} ({kind})" for name, kind in call.opaque.items())
    return (
        f"a call of {call.subject} is in no plan, because of its {arguments}; "
        "give the module a compile_workload() whose spec_of knows it"
    )


def _plan(subject: str, calls: Sequence[_Call], programs: str) -> ShapePlan:
    named = next((call for call in calls if call.workload is not None), None)
    return ShapePlan(
        workload=None if named is None else named.workload,
        settings={} if named is None else named.settings,
        lengths={
            "source": f"observed: {programs}",
            "module": subject,
            "devices": [*sorted({device for call in calls for device in call.devices})],
            "calls": sum(call.count for call in calls),
        },
        specs=tuple(_spec(call) for call in calls),
    )


def _spec(call: _Call) -> InputSpec:
    if call.spec is not None:
        return call.spec
    return InputSpec(
        function=call.function,
        phase=call.phase,
        dtype=call.dtype.removeprefix("torch."),
        example=call.arguments,
        positional=call.positional,
    )
