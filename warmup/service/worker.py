"""The worker: a process of its own, in a session of its own, that carries out one order and ends.

Started as ``python -m warmup.service.worker``. It dies with the service: the end of its standard
input ends it and all that it has started.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING

from pydantic import JsonValue, TypeAdapter

from compilecache.cachedir import CacheDir
from compilecache.errors import CompileCacheError, FingerprintMismatch
from compilecache.progress import OF_A_TARGET
from compilecache.report import TargetReport
from compilecache.shapes import CompileTarget
from compilecache.store import ArtifactStore
from warmup.service.orders import (
    STOP,
    Doing,
    Ended,
    Explained,
    Failed,
    Finished,
    Identified,
    Order,
    Said,
    Trouble,
)

if TYPE_CHECKING:
    from compilecache.engines.harness import Replica


MOVING_SECONDS = 2.0
"""Between two lines about what comes from a store, or goes there."""


class StopAsked(SystemExit):
    """Raised between two targets once the service wants the worker to end."""


class Line:
    """The two pipes to the service, kept out of the way of whatever the workload prints or starts."""

    def __init__(self) -> None:
        self._in, self._out = os.dup(0), os.dup(1)
        self._rest = b""
        self.stop = threading.Event()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.close(nothing)

    def read_order(self) -> Order:
        """The first line."""
        return Order.model_validate_json(self._next())

    def say(self, said: Said) -> None:
        """One line to the service; ends the process when nobody listens any more."""
        data = said.model_dump_json().encode() + b"\n"
        while data:
            data = data[os.write(self._out, data) :]

    def listen(self) -> None:
        """Obeys, in a thread of its own."""
        threading.Thread(target=self._obey, name="orders", daemon=True).start()

    def _obey(self) -> None:
        while line := self._next():
            if line + b"\n" == STOP:
                self.stop.set()
        os.killpg(0, signal.SIGKILL)  # the service is gone, and nobody watches the deadline

    def _next(self) -> bytes:
        while b"\n" not in self._rest:
            data = os.read(self._in, 1 << 16)
            if not data:
                return b""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class Teller:
    """Progress of the library as lines to the service."""

    def __init__(self, line: Line, targets: list[CompileTarget]) -> None:
        self._line = line
        self._open = {target.key: str(target) for target in targets}
        self._moved = 0.0

    def begin(self, count: int) -> None:
        """The service knows."""

    def doing(self, phase: str, what: str) -> None:
        """Names the target by its key where the phase is one of a target."""
        key = self._key(what) if phase in OF_A_TARGET else None
        if phase != "publishing":
            self.stop_if_asked()
        self._line.say(Doing(phase=phase, key=key, what=what))

    def done(self, row: TargetReport) -> None:
        """Published and kept; the place to stop at."""
        self._open.pop(row.key, None)
        self._line.say(Finished(row=row))
        self.stop_if_asked()

    def trouble(self, text: str) -> None:
        """Goes into the job."""
        self._line.say(Trouble(text=text))

    def moving(self, phase: str, done: int, total: int) -> None:
        """Every now and then, in words."""
        if time.monotonic() > self._moved + MOVING_SECONDS:
            self._moved = time.monotonic()
            what = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
            self._line.say(Doing(phase=phase, key=None, what=what))

    def stop_if_asked(self) -> None:
        """Leaves; whatever locks and claims are held are given back on the way."""
        if self._line.stop.is_set():
            raise StopAsked(0)

    def _key(self, what: str) -> str | None:
        return next((key for key, words in self._open.items() if words == what), None)


def _open_store(order: Order) -> ArtifactStore | None:
    if order.store == "none":
        return None
    return ArtifactStore.open(
        order.store, sign_key=order.sign_key, trust_keys=order.trust_keys or None
    )


def explain(order: Order, line: Line) -> None:
    """Says where a start would take each target from."""
    from compilecache.baked import open_baked
    from compilecache.explaining import explain_plan

    found = explain_plan(
        order.plan,
        order.devices,
        CacheDir(order.root),
        _open_store(order),
        open_baked(order.baked, order.trust_keys or None),
    )
    line.say(Identified(digest=found.fingerprint))
    plain: JsonValue = TypeAdapter(JsonValue).validate_python(
        TypeAdapter(dict[str, object]).dump_python(found.as_json(), mode="json")
    )
    line.say(Explained(explanation=plain))


def warm(order: Order, line: Line) -> None:
    """Makes the wanted targets warm, and says of each when it is."""
    import torch

    from compilecache.baked import open_baked
    from compilecache.extras import extra_roots
    from compilecache.fingerprint import fingerprint
    from compilecache.picture.last import keep_report
    from compilecache.pipeline import Job
    from compilecache.pipeline import warm as warm_job
    from compilecache.replicas import build_fakes, build_replicas
    from compilecache.workload import workload_of_plan

    plan = order.plan
    every = plan.targets(order.devices)
    targets = [every[position] for position in order.positions]
    cache, store = CacheDir(order.root), _open_store(order)
    cache.prepare()
    cache.use()
    workload = workload_of_plan(plan)
    for spec in plan.specs:
        workload.check(spec)
    build = build_replicas if order.profile is None else build_fakes
    replicas = build(workload, list(dict.fromkeys(t.device for t in targets)))
    first = next(replicas)
    device, options = torch.device(first.device), plan.compile_options
    mark = fingerprint(workload, first.module, device, options=options, engine=plan.engine)
    line.say(Identified(digest=mark.digest, components=dict(mark.components)))
    refuse_other(order.expected, mark.digest)
    job = Job(
        workload=workload,
        targets=tuple(targets),
        cache=cache,
        store=store,
        options=options,
        engine=plan.engine,
        share=order.share,
        baked=open_baked(order.baked, order.trust_keys or None),
        extras=() if order.profile else extra_roots(order.extra_roots or None, cache),
        lock_timeout=order.lock_timeout,
        profile=order.profile,
    )
    models: chain[Replica] = chain([first], replicas)
    report = warm_job(job, models, Teller(line, targets))
    with suppress(OSError):  # for 'compilecache report' alone
        keep_report(cache.root, report)


def refuse_other(expected: str | None, digest: str) -> None:
    """Raises FingerprintMismatch when this machine is not the one that was asked for."""
    if expected is not None and not digest.startswith(expected):
        raise FingerprintMismatch(
            f"this host's fingerprint is {digest[:12]}, and {expected[:12]} was asked for",
            next_step="Compare them with 'compilecache explain', or submit to a host like the trainer's",
        )


@contextmanager
def prepared(order: Order) -> Iterator[None]:
    """For a GPU that is not there this process is changed for good, while it has but one thread."""
    if order.profile is None:
        yield
        return
    from compilecache.offline import without_gpu

    with without_gpu(order.profile):
        yield


def main(
    carry_out: Callable[[Order, Line], None] = lambda order, line: (
        explain if order.kind == "explain" else warm
    )(order, line),
) -> None:
    """Entry point of the process; ``carry_out`` does what an order says."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    line = Line()
    order = line.read_order()
    try:
        with prepared(order):
            line.listen()
            carry_out(order, line)
    except StopAsked:
        line.say(Ended(stopped=True))
    except CompileCacheError as error:
        line.say(Failed(problem=error.problem, next_step=error.next_step))
    else:
        line.say(Ended(stopped=False))


if __name__ == "__main__":
    main()
