"""What the service is made of, put together once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from compilecache.store import ArtifactStore
from warmup.service.bodies import About, Health
from warmup.service.catalog import Catalog
from warmup.service.database import Database
from warmup.service.doors import Doors
from warmup.service.feed import Feed
from warmup.service.policy import Policy
from warmup.service.queue import Queue
from warmup.service.runner import WORKER, Runner
from warmup.service.settings import Settings, find_devices

STORE_BUDGET_SECONDS = 15.0
"""What the store's failures may cost somebody who looks at the page."""


@dataclass(frozen=True, slots=True)
class Parts:
    """One service."""

    settings: Settings
    doors: Doors
    policy: Policy
    database: Database
    queue: Queue
    feed: Feed
    runner: Runner
    catalog: Catalog
    store: str | None
    """Address of the store."""

    @classmethod
    def assemble(cls, settings: Settings, *, worker: Sequence[str] = WORKER) -> Parts:
        """Opens the queue and the store, and finds devices where none are named; starts nothing.

        ``worker``: command of the process that carries out orders. Raises PlanError and
        UntrustedArtifact for settings that cannot be used.
        """
        doors = Doors(settings.read_token(), settings.hosts)
        store = _open_store(settings)
        devices = settings.devices or find_devices()
        database, feed = Database(settings.state), Feed()
        queue = Queue(database, feed.tell, keep_jobs=settings.keep_jobs)
        return cls(
            settings=settings,
            doors=doors,
            policy=Policy(settings.workloads, settings.compile_options, devices),
            database=database,
            queue=queue,
            feed=feed,
            runner=Runner(queue, settings, command=worker),
            catalog=Catalog(lambda: _open_store(settings)),
            store=store.url if store else None,
        )

    def about(self) -> About:
        """What the service says of itself."""
        return About(
            version=_version(),
            devices=self.policy.devices,
            workloads=self.settings.workloads,
            store=self.store,
            needs_token=not self.doors.open,
            listeners=self.feed.listeners,
        )

    def readiness(self) -> Health:
        """Whether jobs are taken and worked on."""
        if self.runner.broken:
            return Health(ok=False, why=f"the runner has ended: {self.runner.broken}")
        if not self.runner.alive:
            return Health(ok=False, why="the service is starting or stopping")
        self.queue.last_event()
        return Health(ok=True)


def _open_store(settings: Settings) -> ArtifactStore | None:
    """Anew for every look: a store that has failed stays failed for who has it open."""
    if settings.store == "none":
        return None
    return ArtifactStore.open(
        settings.store,
        budget_seconds=STORE_BUDGET_SECONDS,
        sign_key=settings.sign_key,
        trust_keys=settings.trust_keys or None,
    )


def _version() -> str:
    try:
        return version("compilecache")
    except PackageNotFoundError:
        return "0"
