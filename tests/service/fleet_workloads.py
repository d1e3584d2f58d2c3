"""A workload for the hosts of a fleet, which says where it runs, and hangs on one of them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from compilecache.claims import Claims
from compilecache.examples import ExampleWorkload
from compilecache.shapes import InputSpec

# The claims of a dead host lapse after seconds, so that the test does not wait for most of a minute.
Claims.__init__.__kwdefaults__.update(lease=4.0, every=0.5)  # type: ignore[union-attr]


class Placed(ExampleWorkload):
    """Appends what the host lets it see to the file SEEN."""

    def step(
        self, spec: InputSpec, module: nn.Module, inputs: Mapping[str, object]
    ) -> torch.Tensor | None:
        names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        with Path(os.environ["SEEN"]).open("a") as seen:
            seen.write(" ".join(f"{name}={os.environ.get(name)}" for name in names) + "\n")
        if "HANGS" in os.environ:
            time.sleep(600)
        return super().step(spec, module, inputs)


placed = Placed(build="workloads:Product")
