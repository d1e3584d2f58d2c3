"""Several processes of one job: all are warm, or all stop, before the first collective.

They talk through the job's rendezvous store, so no collective is needed, and a rank that never
arrives is named instead of hanging the others.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Protocol, cast

from compilecache.errors import CompileFailed

_calls = itertools.count()


class _RendezvousStore(Protocol):
    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...

    def check(self, keys: list[str]) -> bool: ...


def agree(problem: str | None, *, timeout: float) -> None:
    """Tells the other ranks how this one fared and hears of them. Does nothing outside a job.

    Raises CompileFailed naming the ranks that failed, with their reasons, or that did not report
    within ``timeout`` seconds.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = rendezvous_store()
    call, world = next(_calls), dist.get_world_size()
    keys = [f"compilecache/{call}/{rank}" for rank in range(world)]
    store.set(keys[dist.get_rank()], problem or "")
    _wait(store, keys, timeout)
    failed = {rank: text.decode() for rank in range(world) if (text := store.get(keys[rank]))}
    if failed:
        rank, reason = next(iter(failed.items()))
        raise CompileFailed(
            f"ranks {sorted(failed)} of {world} are not warm; rank {rank}: {reason}",
            next_step="Mend what the rank names; no rank has started training",
            target=f"rank {rank}",
        )


def _wait(store: _RendezvousStore, keys: list[str], timeout: float) -> None:
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:  # DistStoreError is one
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise CompileFailed(
            f"ranks {late} of {len(keys)} did not finish warming up within {timeout:.0f} s",
            next_step="Look at their logs, or raise rank_timeout",
            target=f"rank {late[0] if late else '?'}",
        ) from error


def rendezvous_store() -> _RendezvousStore:
    """The store that ``init_process_group`` made; torch has no public name for it."""
    from torch.distributed import distributed_c10d

    return cast(_RendezvousStore, distributed_c10d._get_default_store())
