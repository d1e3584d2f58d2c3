"""The second process of the lock's check: ``python -m compilecache.doctor.second ROOT``.

It tries to take the lock and says "refused" or "taken". Told to go on, it takes the lock, says
"held", and waits to be killed.
"""

from __future__ import annotations

import sys

from compilecache.cachedir import CacheDir
from compilecache.errors import LockTimeout

PATIENCE = 10.0
"""Seconds in which a free lock must be had."""


def main(root: str) -> None:
    """Both tries, told on standard output, a line each."""
    cache = CacheDir(root)
    try:
        with cache.lock("doctor: a second process", timeout=0.0):
            print("taken", flush=True)
    except LockTimeout:
        print("refused", flush=True)
    sys.stdin.readline()
    with cache.lock("doctor: a second process, to be killed", timeout=PATIENCE):
        print("held", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1])
