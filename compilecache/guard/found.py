"""The last look before training: a thread that did not prime finds every target all the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from compilecache import torch_names
from compilecache.engines.harness import Harness, Replica
from compilecache.errors import CompileCacheError, UnexpectedCompile
from compilecache.guard import hooks
from compilecache.guard.attempt import Attempt
from compilecache.guard.seal import Planned
from compilecache.guard.state import ThreadState


def find_in_threads(
    planned: Planned,
    replicas: Sequence[Replica],
    harness: Harness,
    state: ThreadState,
    strict: bool,
) -> list[str]:
    """Runs every warm target once in a new thread for each replica, one at a time.

    Returns what was not found, in words; with ``strict`` raises it. CUDA graphs are left out: they
    belong to the thread that primed.
    """
    problems: list[CompileCacheError] = []
    for replica in replicas:
        functions = planned.workload.functions(replica.module).values()
        if any(torch_names.uses_cuda_graphs(function) for function in functions):
            continue
        thread = threading.Thread(
            target=_find,
            args=(planned, replica, harness, state, problems),
            name=f"check {replica.device}",
        )
        thread.start()
        thread.join()
    if strict and problems:
        raise problems[0]
    return [str(problem) for problem in problems]


def _find(
    planned: Planned,
    replica: Replica,
    harness: Harness,
    state: ThreadState,
    problems: list[CompileCacheError],
) -> None:
    watch = _Refusing()
    for target in planned.targets:
        if target.device != replica.device or target.key in planned.failed:
            continue
        try:
            with hooks.listening(watch), state.adopt(), state.autocast():
                harness.once(target, replica.module)
        except CompileCacheError as error:
            problems.append(error)


class _Refusing:
    """Refuses whatever this thread attempts, also where the seal would let it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    @contextmanager
    def attempt(self, attempt: Attempt) -> Iterator[None]:
        if threading.get_ident() == self._thread or attempt.kind == "backward":
            raise UnexpectedCompile(
                f"{attempt.words} although the process is primed",
                next_step="See docs/troubleshooting.md, 'not found in threads'",
                target=attempt.function,
                thread=attempt.thread,
                shapes=attempt.shapes,
            )
        yield
