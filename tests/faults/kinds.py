"""The kinds of faults that are tried, and the trying until one took effect."""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

from ground import IMPATIENT, IMPATIENT_BUDGET, Address, Ground
from mounts import tmpfs
from pod import Said, drain
from processes import Running
from proxy import Act, Proxy, What
from scene import Scene
from trials import Outcome, Trial

from compilecache.artifact import Record
from compilecache.claims import Claim
from compilecache.errors import CompileCacheError

LARGE = 8
"""One trial in so many has packs of many megabytes."""
DISK = "size=80m"


class Kill(Trial):
    """SIGKILL at a random moment: of the clock, or at or soon after a random operation on a file."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        if self.outcome.number % 4 == 0:
            self.scene = replace(self.scene, size=3_000_000)

    def strike(self) -> Said | None:
        pace = self.ground.pace(self.scene, s3=self.s3, restores=self.restores)
        if self.chance.random() < 0.6:
            dies_at = self.chance.randint(1, pace.operations)
            after = self.chance.choice((0.0, self.chance.uniform(0, 0.005)))
            task = replace(self.task(), dies_at=dies_at, dies_after=after)
            return self._ended(self.ground.start(task))
        pod = self.ground.start(self.task())
        time.sleep(self.chance.uniform(0, pace.seconds))
        pod.kill()
        return self._ended(pod)

    def _ended(self, pod: Running) -> Said | None:
        self.outcome.struck = pod.wait().code == -9
        return None

    def go_on(self) -> None:
        """One time in four on another root, where the dead pod's claims are waited for."""
        if self.chance.random() < 0.25:
            self.root = self.folder / "elsewhere"
        super().go_on()


class KillPublisher(Kill):
    """Of a pod that makes and publishes."""

    kind = "kill_publisher"

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.restores = False


class KillRestorer(Kill):
    """Of a pod that restores."""

    kind = "kill_restorer"

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.restores = True


class Network(Trial):
    """Between pod and server something happens to one request, to a few, or to all from one on."""

    acts: ClassVar[tuple[What, ...]]
    most: ClassVar[int]
    """In a row."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.s3 = True
        if self.outcome.number % LARGE == 0:
            size = self.chance.choice((9_000_000, 34_000_000))
            self.scene = Scene(f"large {size}", count=1, size=size)

    def strike(self) -> Said | None:
        pace = self.ground.pace(self.scene, s3=True, restores=self.restores)
        first = self.chance.randrange(pace.requests)
        count = self.chance.randint(1, self.most)
        plan = {number: self._act() for number in range(first, first + count)}
        if self.chance.random() < 0.2:
            self.proxy.begin(ever_after=(first, self._act()))
        else:
            self.proxy.begin(plan)
        options = self.address.options(self.proxy.url) | {"config_kwargs": IMPATIENT}
        said = self.end_of(
            self.ground.start(replace(self.task(), options=options, budget=IMPATIENT_BUDGET))
        )
        self.outcome.struck = self.proxy.struck > 0
        return said

    def _act(self) -> Act:
        what = self.chance.choice(self.acts)
        return Act(what, self.chance.random(), self.chance.random() < 0.5)

    def mend(self) -> None:
        self.proxy.begin()


class Cut(Network):
    """The connection ends in a request, in an answer, or between the two."""

    kind = "cut"
    acts = ("cut request", "cut answer", "cut answer", "lose answer")
    most = 3


class Errors(Network):
    """Bursts of 500 and 503."""

    kind = "errors"
    acts = ("InternalError", "SlowDown", "ServiceUnavailable")
    most = 6


class Stall(Network):
    """30 s of silence."""

    kind = "stall"
    acts = ("stall", "stall", "stall in answer")
    most = 2


class DiskFull(Trial):
    """Somebody fills the disk, or uses up its inodes, in the middle of a run."""

    kind = "disk_full"

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.disk = self.folder / "disk"
        self.on_store = self.chance.random() < 0.3
        if self.on_store:
            self.restores, self.s3 = False, False
        else:
            self.root = self.disk / "root"

    def prepare(self, stack: ExitStack) -> None:
        stack.enter_context(tmpfs(self.disk, f"{DISK},nr_inodes=2000"))
        super().prepare(stack)
        if self.on_store:
            self.address = Address(str(self.disk / "store"))

    def strike(self) -> Said | None:
        pace = self.ground.pace(self.scene, s3=self.s3, restores=self.restores)
        at = self.chance.randint(1, pace.operations)
        left = self.chance.randrange(2 * self.scene.size)
        names = self.chance.random() < 0.25
        task = replace(self.task(), fills=(at, self.disk, left), uses_up_names=names)
        said = self.end_of(self.ground.start(task))
        self.outcome.struck = said != Said(
            compiled=said.compiled, operations=said.operations, seconds=said.seconds
        )
        return said

    def mend(self) -> None:
        drain(self.disk)


class Damage(Trial):
    """One object of the store is no more what was published."""

    harms_the_store = True

    def prepare(self, stack: ExitStack) -> None:
        whole = self.ground.published(self.scene, s3=self.s3)
        self.address = self.ground.copy(whole, self.folder)
        self.objects = self.address.objects.all()
        names = sorted(self.objects)
        wanted = self.chance.choice(("/packs/", "/packs/", "/artifacts/", ""))
        self.name = self.chance.choice([name for name in names if wanted in name])

    def known(self) -> set[str]:
        """Targets that do not need what is about to be damaged."""
        records = {
            name: Record.parse(data) for name, data in self.objects.items() if "/artifacts/" in name
        }
        return {
            record.key
            for name, record in records.items()
            if name != self.name and not any(e.pack in self.name for e in record.files)
        }

    def strike(self) -> Said | None:
        harmed = self.harmed(self.objects[self.name])
        self.outcome.struck = harmed != self.objects[self.name]
        self.address.objects.put(self.name, harmed)
        return self.end_of(self.ground.start(self.task()))

    @abstractmethod
    def harmed(self, data: bytes) -> bytes:
        """What lies there instead."""

    def look(self, said: Said | None, before: set[str]) -> None:
        super().look(said, before)
        if said is not None:
            have = {path.stem for path in self.root.glob(".compilecache/records/*/*.json")}
            self.outcome.lost += [f"{key} was not restored" for key in before - have]


class Truncated(Damage):
    """Its end is missing."""

    kind = "truncated"

    def harmed(self, data: bytes) -> bytes:
        return data[: self.chance.randrange(len(data))]


class Flipped(Damage):
    """One bit is another."""

    kind = "flipped"

    def harmed(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        return bytes(changed)


class Clock(Trial):
    """Clocks that are an hour wrong: of a holder that is dead, or of a pod that is alive."""

    kind = "clock"

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.restores = False
        self.shift = self.chance.choice((-3600.0, 3600.0))

    def strike(self) -> Said | None:
        self.outcome.struck = True
        return self._beside_the_dead() if self.outcome.number % 4 < 2 else self._beside_another()

    def _beside_the_dead(self) -> Said:
        """Claims of a pod that is gone; its clock was wrong."""
        fingerprint = self._fingerprint()
        moment = time.gmtime(time.time() + self.shift)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", moment)
        objects = self.address.objects
        for key in self.chance.sample(sorted(self.scene.targets), 2):
            for beat in range(self.chance.randint(1, 4)):
                claim = Claim(holder="f" * 32, host="gone", pid=7, since=since, beat=beat)
                objects.put(f"v1/{fingerprint}/claims/{key}/{beat + 1}.json", claim.dump())
        said = self.end_of(self.ground.start(self.task()))
        self.outcome.unfinished += [f"beside the dead: {word}" for word in said.missing]
        return said

    def _beside_another(self) -> Said:
        """Two cold pods, one with a wrong clock: each target is compiled by one of them."""
        common = replace(self.task(), lease=20.0, beat=0.05, compile_seconds=0.15)
        wrong = self.ground.start(replace(common, shift=self.shift))
        right = self.ground.start(replace(common, root=self.folder / "other"))
        ended = [self.end_of(pod) for pod in (wrong, right)]
        made = [key for said in ended for key in said.compiled]
        self.outcome.twice += sorted({key for key in made if made.count(key) > 1})
        self.outcome.unfinished += [f"beside another: {w}" for s in ended for w in s.missing]
        self.outcome.damaged += self.scene.wrong_in_root(self.folder / "other")
        self.outcome.crashed += [ended[1].crash] if ended[1].crash else []
        return ended[0]

    def _fingerprint(self) -> str:
        """What pods of this environment call theirs."""
        (digest,) = (
            self.ground.published(Scene("any", 1), s3=False).mirror(self.folder).fingerprints()
        )
        return digest


KINDS: dict[str, type[Trial]] = {
    kind.kind: kind
    for kind in (
        KillPublisher, KillRestorer, Cut, Errors, Stall, DiskFull, Truncated, Flipped, Clock,
    )
}  # fmt: skip
ATTEMPTS = 12


def attempt(kind: str, ground: Ground, proxy: Proxy, seed: int, number: int) -> Outcome:
    """One trial in which the fault took effect; tried again where it came too late."""
    outcome = Outcome(kind, number)
    for again in range(ATTEMPTS):
        try:
            outcome = KINDS[kind](ground, proxy, seed, number, again).run()
        except (CompileCacheError, OSError, AssertionError) as error:
            return Outcome(
                kind, number, struck=True, unfinished=[f"{type(error).__name__}: {error}"]
            )
        if outcome.struck:
            break
    return outcome
