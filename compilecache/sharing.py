"""In which order a process takes its targets, so that those that start cold at once each do a part.

What is free in the store is claimed, compiled and published; what others have claimed comes at the end,
when it is there. A store that cannot be shared in this way costs work done twice, never a target.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from compilecache.claims import Claims, Held
from compilecache.exchange import Exchange, Restored
from compilecache.shapes import CompileTarget

FIRST_PAUSE = 0.2
LONGEST_PAUSES = 1.0, 30.0
PAUSE_PER_TARGET = 0.25
"""Seconds that the longest pause grows by for each target waited for: each costs two requests a look."""
GROWTH = 1.5
LISTED_EVERY = 5.0
"""Seconds between two looks at all that is published, while there is something to claim."""
SAID_EVERY = 10.0
"""Seconds between two words about the same holders."""
NAMED = 3
"""Holders that one word names."""

NOT_EXCLUSIVE = (
    "does not refuse a second write of one name, so processes cannot share the compiling: each compiles "
    "whatever is missing when it comes to it. Use one that knows 'If-None-Match', or share=False"
)


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears of it, and how time passes."""

    restored: Callable[[Restored], None]
    """Something of others has come into the root."""
    waiting: Callable[[str], None]
    """For whom, in words."""
    alone: Callable[[OSError | str], None]
    """Why nothing is shared from now on, the store or the root; may raise it."""
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


class Sharing:
    """The turns of one warm-up, under the lock of its root. To be closed."""

    def __init__(self, exchange: Exchange, claims: Claims, listener: Listener) -> None:
        self._exchange = exchange
        self._claims = claims
        self._hears = listener
        self._held: Held | None = None
        self._shared: bool | None = None
        self._crowded = False
        self._bad: dict[str, int] = {}
        """Published targets that could not be restored, and their generations; 0: the record is gone."""
        self._pause = FIRST_PAUSE
        self._said = ("", 0.0)
        self._listed: tuple[frozenset[str], float] = (frozenset(), -LISTED_EVERY)

    def turns(self, targets: Sequence[CompileTarget]) -> Iterator[CompileTarget]:
        """Each target once. It is complete in the root, or to be compiled by whoever asked.

        What is missing and free comes first, in the order of the plan from a place of this process's own;
        then what is complete; at the end what others had claimed, when they are done or dead.
        """
        left = {target.key: target for target in targets}
        queue = deque(key for key in left if key in self._exchange.missing)
        while queue:
            key = queue.popleft()
            if key in self._made() and key not in self._bad:
                continue
            if self._take(key):
                yield left.pop(key)
                self._let_go()
            elif queue and not self._crowded:
                self._crowded = True
                queue.rotate(-self._claims.share(len(queue)))
        while left:
            self._fetch(left)
            for key in [key for key in left if key in self._exchange.complete]:
                self._pause = FIRST_PAUSE
                yield left.pop(key)
            free = next((key for key in left if self._take(key)), None)
            if free is not None:
                yield left.pop(free)
                self._let_go()
            elif left and not self._exchange.complete.keys() & left.keys():
                self._wait(list(left.values()))

    def close(self) -> None:
        """Gives back what is held, when somebody stops in the middle."""
        held, self._held = self._held, None
        if held is not None:
            held.end("free")

    # -- claiming -----------------------------------------------------------------------------

    def _take(self, key: str) -> bool:
        """Whether to compile it now: claimed, or no use to claim."""
        if not self._asked_once():
            return True
        try:
            held = self._claims.take(key, again=key in self._bad)
            if held is None:
                return self._claims.hopeless(key)
            self._held = held
            if held.after == "published":
                self._bad.pop(key, None)  # somebody has mended it since
            self._fetch({key})  # published before we claimed, or by somebody who claims nothing
            if key in self._exchange.complete:
                self._let_go()
                return False
            held.start()
        except OSError as error:
            self._go_alone(error)
        return True

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.end("published" if self._exchange.published(held.key) else "failed")

    def _asked_once(self) -> bool:
        if self._shared is None:
            try:
                self._shared = self._claims.exclusive()
                self._bad = self._exchange.unusable() if self._shared else {}
            except OSError as error:
                self._go_alone(error)
            else:
                if not self._shared:
                    self._hears.alone(NOT_EXCLUSIVE)
        return bool(self._shared)

    def _go_alone(self, error: OSError) -> None:
        self._shared = False
        self.close()
        self._hears.alone(error)

    # -- what others have made ----------------------------------------------------------------

    def _made(self) -> frozenset[str]:
        """What is published, as of lately: of a large plan most is, and a claim on each would cost more."""
        keys, when = self._listed
        if self._crowded and self._shared and self._hears.clock() - when >= LISTED_EVERY:
            try:
                keys = self._exchange.published_keys()
            except OSError as error:
                self._go_alone(error)
            self._listed = keys, self._hears.clock()
        return keys if self._shared else frozenset()

    def _fetch(self, keys: Collection[str]) -> None:
        """Restores those of these that are published by now."""
        missing = self._exchange.missing.intersection(keys)
        if not missing or not self._shared:
            return
        ended = {key for key in missing if self._claims.published(key)}
        try:
            found = self._exchange.refresh(missing)
            wanted = {key for key, made in found.items() if made > self._bad.get(key, 0)}
            if wanted:
                self._hears.restored(self._exchange.restore_again(wanted))
        except OSError as error:
            self._go_alone(error)
            return
        self._bad |= {key: found[key] for key in wanted & self._exchange.missing}
        self._bad |= dict.fromkeys(ended - found.keys(), 0)

    # -- waiting ------------------------------------------------------------------------------

    def _wait(self, targets: Sequence[CompileTarget]) -> None:
        of, when = self._said
        now, keys = self._hears.clock(), " ".join(target.key for target in targets)
        if of != keys or now - when >= SAID_EVERY:
            self._said = keys, now
            self._hears.waiting(self._words(targets))
        self._hears.sleep(self._pause * random.uniform(0.5, 1.0))
        shortest, longest = LONGEST_PAUSES
        most = min(max(PAUSE_PER_TARGET * len(targets), shortest), longest)
        self._pause = min(self._pause * GROWTH, most)

    def _words(self, targets: Sequence[CompileTarget]) -> str:
        named = []
        for target in targets[:NAMED]:
            seen = self._claims.seen(target.key)
            who = f"{seen[0]}, for {seen[1]:.0f} s" if seen else "nobody"
            named.append(f"{target} ({who})")
        more = f", and {len(targets) - NAMED} more" if len(targets) > NAMED else ""
        return f"for {'; '.join(named)}{more}"
