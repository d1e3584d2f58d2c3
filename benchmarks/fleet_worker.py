"""One pod of the fleet benchmark: waits for a line, then warms a small model and says how it went.

``--wait``: seconds that every compile takes on top of its own moment, spent asleep, so that pods which
share two cores take as long as pods with cores of their own. Prints "ready", then one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection

import torch
from torch import nn

from compilecache import ensure_warm
from compilecache.engines.harness import Run
from compilecache.engines.trace import TraceEngine
from compilecache.shapes import CompileTarget

TARGETS = 12
WIDTH = 8


class Product(nn.Module):
    """One matrix product: compiled within a moment, since it needs no C++ kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, WIDTH] → [B, WIDTH]."""
        return x @ self.weight


def slow_down(seconds: float) -> None:
    """Lets every target that is not complete take so much longer."""
    run = TraceEngine.run

    def slow(
        self: TraceEngine,
        target: CompileTarget,
        module: nn.Module,
        present: Collection[str] | None = None,
    ) -> Run:
        if present is None:
            time.sleep(seconds)
        return run(self, target, module, present)

    TraceEngine.run = slow  # type: ignore[method-assign]


def main() -> None:
    """Imports everything, waits for the start, warms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--no-share", action="store_true")
    options = parser.parse_args()
    if options.wait:
        slow_down(options.wait)
    import torch._inductor.compile_fx

    import compilecache.s3  # noqa: F401 - before the clock starts, like torch

    torch.set_num_threads(1)
    model = Product()
    shapes = [{"x": torch.empty(rows, WIDTH, device="meta")} for rows in range(2, 2 + TARGETS // 2)]
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    with ensure_warm(
        model, shapes, store=options.store, root=options.root, share=not options.no_share
    ) as warm:
        seconds = time.perf_counter() - began
        report = warm.report
    print(
        json.dumps(
            {
                "seconds": seconds,
                "targets": len(report.targets),
                "compiled": report.count("compiled"),
                "compiles": report.compiles,
                "warm": report.warm,
                "gave_up": report.gave_up,
            }
        )
    )


if __name__ == "__main__":
    main()
