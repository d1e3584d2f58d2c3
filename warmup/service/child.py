"""A worker's process: started, listened to, ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from warmup.service.orders import STOP, Order

LOG_BYTES = 4 << 20
"""A log that has grown larger is begun anew with the next worker."""
LINE_BYTES = 8 << 20
"""A worker that says a longer line has lost its mind."""
GOING_SECONDS = 2.0
"""Between a worker's last word and its end: it has nothing left to lose then."""


class Child:
    """One worker."""

    def __init__(
        self, command: Sequence[str], order: Order, log_file: Path, environment: Mapping[str, str]
    ) -> None:
        large = log_file.exists() and log_file.stat().st_size > LOG_BYTES
        with log_file.open("wb" if large else "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    **environment,
                },
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout.fileno()
        self._rest = b""
        self._silent = False
        self._tell(order.model_dump_json().encode() + b"\n")

    def lines(self, seconds: float) -> list[bytes] | None:
        """What it said within that time, empty when nothing; None once it has ended and said all."""
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return None if self._has_ended() else []
        data = os.read(self._out, 1 << 18)
        if not data or len(self._rest) > LINE_BYTES:
            self._silent = True
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        return whole

    def stop(self) -> None:
        """Asks it to end between two targets."""
        self._tell(STOP)

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._in.write(line)
            self._in.flush()

    def end(self) -> int:
        """Its exit code. Kills what still runs of its session, and waits for that."""
        patience = time.monotonic() + (GOING_SECONDS if self._silent else 0.0)
        while not self._has_ended() and time.monotonic() < patience:
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        self._process.stdout.close()  # type: ignore[union-attr]
        return code

    def _has_ended(self) -> bool:
        """Leaves it a zombie, so that its number stays its own until its session has been killed."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None
