"""A fresh process of the GPU tests: restores, and steps only in a thread of its own."""

from __future__ import annotations

import json
import sys

import torch
from gpu_guard import Net, rows

from compilecache import ensure_warm


def main() -> None:
    """Arguments: folder, name of the root, device."""
    folder, name, device = sys.argv[1:]
    torch.manual_seed(0)
    model = Net().to(device)
    with (
        ensure_warm(model, [rows(3)], store=f"{folder}/store", root=f"{folder}/{name}") as warm,
        warm.crew() as crew,
    ):

        def work() -> None:
            for _ in range(3):
                with warm.step():
                    model(**rows(3, device)).sum().backward()

        crew.start(work, device=device)
    statuses = [row.status for row in warm.report.targets]
    print(json.dumps({"status": statuses, "compiles": warm.compiles_after_prime}))


if __name__ == "__main__":
    main()
