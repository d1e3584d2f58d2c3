"""The workload of ``fleet_ray.py``, imported by the hosts: one matrix product, and compiles that take a while.

Every compile takes FLEET_WAIT seconds more than its own moment, asleep, and appends its target to the file
FLEET_COMPILES when it is done, on whichever host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from fleet_worker import Product
from torch import nn

from compilecache.engines.harness import Run
from compilecache.engines.trace import TraceEngine
from compilecache.examples import ExampleWorkload
from compilecache.shapes import CompileTarget

__all__ = ["Product", "product"]

_run = TraceEngine.run


def _slow(
    self: TraceEngine,
    target: CompileTarget,
    module: nn.Module,
    present: Collection[str] | None = None,
) -> Run:
    if present is None:
        time.sleep(float(os.environ["FLEET_WAIT"]))
    done = _run(self, target, module, present)
    if done.evidence.misses:
        with Path(os.environ["FLEET_COMPILES"]).open("a") as file:
            file.write(f"{target.key}\n")
    return done


TraceEngine.run = _slow  # type: ignore[method-assign]
product = ExampleWorkload(build="fleet_ray_workload:Product")
