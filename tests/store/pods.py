"""Pods without torch: each has a root, a clock and a client of its own, and "compiles" by writing files."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from compilecache.cachedir import CacheDir
from compilecache.claims import Claims
from compilecache.errors import StoreUnavailable
from compilecache.exchange import Exchange, Restored
from compilecache.fingerprint import Fingerprint
from compilecache.shapes import CompileTarget, InputSpec
from compilecache.sharing import Listener, Sharing
from compilecache.store import ArtifactStore

MARK = Fingerprint({"torch": "2", "device": "cpu"})
LIBRARY = "ab/cshared.so"
"""What every pod builds for itself, in other bytes."""


def targets(count: int) -> tuple[CompileTarget, ...]:
    """As many targets, in the order of a plan."""
    return tuple(
        CompileTarget(InputSpec(dims={"seq_len": 128 * n}), "cpu") for n in range(1, count + 1)
    )


class Clock:
    """Time that passes when somebody sleeps; ``meanwhile`` is what the others do then."""

    def __init__(self, start: float = 0.0, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.now = start
        self.meanwhile = meanwhile

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


class Pod:
    """One pod of a fleet."""

    def __init__(
        self,
        folder: Path,
        store: ArtifactStore,
        *,
        clock: Clock | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.name = folder.name
        self.cache = CacheDir(folder)
        self.cache.prepare()
        self.store = store
        self.seconds = seconds
        """What one compile takes."""
        self.compiled: list[str] = []
        self.order: list[str] = []
        self.waited: list[str] = []
        self.alone: list[str] = []
        self.restored = Restored()
        self.exchange: Exchange | None = None
        clocked = {"sleep": clock.sleep, "clock": clock} if clock else {}
        self.hears = Listener(self.restored.add, self.waited.append, self._goes_alone, **clocked)
        self.claims = Claims(store, MARK.digest, clock=clock or time.monotonic, every=1.0)

    def _goes_alone(self, why: OSError | str) -> None:
        self.alone.append(str(why))

    def begin(self, wanted: Sequence[CompileTarget]) -> Sharing:
        """Looks at root and store, as the pipeline does under its lock."""
        self.exchange = Exchange(self.cache, self.store, MARK, [target.key for target in wanted])
        self.exchange.look(repair=True)
        try:
            self.restored.add(self.exchange.restore())
        except StoreUnavailable as error:
            self.alone.append(str(error))
        return Sharing(self.exchange, self.claims, self.hears)

    def run(self, wanted: Sequence[CompileTarget], fails: Sequence[str] = ()) -> None:
        """Gets every target; those that fail are not published."""
        with closing(self.begin(wanted)) as sharing:
            for target in sharing.turns(wanted):
                self.order.append(target.key)
                if target.key not in self.exchange.complete:
                    self.compile(target, publishes=target.key not in fails)

    def compile(self, target: CompileTarget, *, publishes: bool = True) -> None:
        """Writes what a compile would and publishes it."""
        time.sleep(self.seconds)
        self.compiled.append(target.key)
        files = {
            f"fxgraph/{target.key}/{self.name}": f"{target.key} by {self.name}",
            LIBRARY: self.name,
        }
        for name, text in files.items():
            path = self.cache.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(text)
        if publishes:
            try:
                self.exchange.publish(target, set(files), None)
            except StoreUnavailable as error:
                self.alone.append(str(error))

    def damaged(self) -> list[str]:
        """What a later start would find wrong with this root."""
        keys = list(self.exchange.keys)
        later = Exchange(self.cache, None, MARK, keys)
        return [*later.look(), *sorted(later.missing)]


def together(pods: Sequence[Pod], wanted: Sequence[CompileTarget]) -> None:
    """Lets pods run at once, each in a thread of its own."""
    errors: list[BaseException] = []

    def run(pod: Pod) -> None:
        try:
            pod.run(wanted)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(pod,)) for pod in pods]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def main() -> None:
    """``pods.py STORE ROOT COUNT SECONDS``: a pod in a process of its own; prints what it compiled."""
    url, root, count, seconds = sys.argv[1:]
    options = {}
    if url.startswith("s3:"):
        url, _, endpoint = url.partition(" ")
        options = {"endpoint_url": endpoint, "key": "testing", "secret": "testing"}
    store = ArtifactStore.open(url, storage_options=options)
    store.fingerprints()  # imports and connects
    pod = Pod(Path(root), store, seconds=float(seconds))
    print("ready", flush=True)
    sys.stdin.readline()
    pod.run(targets(int(count)))
    assert pod.damaged() == []
    print(*pod.compiled, flush=True)


if __name__ == "__main__":
    main()
