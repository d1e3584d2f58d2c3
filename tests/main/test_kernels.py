"""What of Triton's cache travels, and how it is made usable in another root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch
from places import Place
from processes import Template
from torch import nn
from workloads import Product

from compilecache import ensure_warm
from compilecache.contents import travels
from compilecache.examples import ExampleWorkload, specs_of_examples
from compilecache.kernels import is_group, is_stub, kernel_folder, looked_up, regroup
from compilecache.report import Report
from compilecache.shapes import InputSpec, plan_of


def test_kernels_that_triton_was_asked_for_travel_whole_but_for_their_list() -> None:
    """The list holds absolute paths; it is written anew in every root."""
    kernels = looked_up(["triton/HASH/__grp__k.json", "fxgraph/a/b", "triton/OTHER/k.cubin"])
    assert kernels == {"triton/HASH"}
    assert travels("triton/HASH/k.cubin", kernels)
    assert travels("triton/HASH/k.json", kernels)
    assert not travels("triton/HASH/__grp__k.json", kernels)
    assert not travels("triton/OTHER/k.cubin", kernels)


def test_a_kernel_that_is_being_written_counts() -> None:
    """Triton writes into a temporary folder below the kernel's."""
    used = "triton/0/HASH/tmp.pid_12_ab-cd/__grp__k.json"
    assert kernel_folder(used) == "triton/0/HASH"
    assert looked_up([used]) == {"triton/0/HASH"}


def test_what_triton_builds_with_gcc_always_travels() -> None:
    """No FX-graph entry holds the stub that reaches the driver."""
    path = "triton/HASH/cuda_utils.cpython-312-x86_64-linux-gnu.so"
    assert is_stub(path)
    assert travels(path)


def test_lists_name_the_files_of_their_own_root(tmp_path: Path) -> None:
    """A kernel moved to another root is found there: each list names existing files beside it."""
    folder = tmp_path / "triton" / "HASH"
    folder.mkdir(parents=True)
    for name in ("k.json", "k.cubin", "k.ptx"):
        (folder / name).write_text("{}")
    stale = {"child_paths": {"k.json": "/elsewhere/triton/HASH/k.json"}}
    (folder / "__grp__k.json").write_text(json.dumps(stale))
    regroup(tmp_path, ["triton/HASH/k.json", "triton/HASH/k.cubin", "triton/HASH/k.ptx"])
    children = json.loads((folder / "__grp__k.json").read_text())["child_paths"]
    assert children == {name: str(folder / name) for name in ("k.cubin", "k.json", "k.ptx")}
    assert is_group("triton/HASH/__grp__k.json")
    before = (folder / "__grp__k.json").stat().st_mtime_ns
    regroup(tmp_path, ["triton/HASH/k.json"])
    assert (folder / "__grp__k.json").stat().st_mtime_ns == before


def test_a_damaged_list_is_written_anew(tmp_path: Path) -> None:
    """Truncated, or no list at all."""
    folder = tmp_path / "triton" / "HASH"
    folder.mkdir(parents=True)
    (folder / "k.json").write_text("{}")
    for text in (
        "",
        "[1]",
        '{"child_paths": 3}',
        '{"child_paths": {}}',
        '{"child_paths": {"k.json": 1}}',
    ):
        (folder / "__grp__k.json").write_text(text)
        regroup(tmp_path, ["triton/HASH/k.json"])
        children = json.loads((folder / "__grp__k.json").read_text())["child_paths"]
        assert children == {"k.json": str(folder / "k.json")}


class LooksUp(ExampleWorkload):
    """Does at every step what Inductor does on a GPU: asks Triton's own cache for one more kernel.

    As Triton does, it takes the kernel only if its list names files that exist, and else runs ptxas
    and writes the files into a temporary folder first.
    """

    def step(
        self, spec: InputSpec, module: nn.Module, inputs: Mapping[str, object]
    ) -> torch.Tensor | None:
        folder = Path(os.environ["TRITON_CACHE_DIR"], "HASH")
        if not self._found(folder / "__grp__k.json"):
            subprocess.run([os.environ["FAKE_PTXAS"], "k.ptx", "-o", "k.cubin"], check=True)
            self._write(folder)
        return super().step(spec, module, inputs)

    def _found(self, group: Path) -> bool:
        if not group.exists():
            return False
        with group.open() as file:
            children = json.load(file)["child_paths"]
        return bool(children) and all(Path(path).exists() for path in children.values())

    def _write(self, folder: Path) -> None:
        names = ("k.cubin", "k.json", "__grp__k.json")
        listed = json.dumps({"child_paths": {name: str(folder / name) for name in names[:2]}})
        for name in names:
            temp = folder / "tmp.pid_1_ab" / name
            temp.parent.mkdir(parents=True, exist_ok=True)
            temp.write_text(listed if name == names[2] else "{}")
            temp.replace(folder / name)
        temp.parent.rmdir()


def _warm_looking_up(folder: Path, root: str) -> Report:
    example = torch.ones(2, 8)
    module = Product()
    workload = LooksUp([example], module=module)
    return ensure_warm(
        module,
        plan_of(specs_of_examples([example], module, phases=["train"])),
        workload=workload,
        store=folder / "store",
        root=folder / root,
    ).report


def test_a_kernel_looked_up_in_tritons_cache_is_found_in_another_root(
    fresh: Template, seeded: Place
) -> None:
    """Counters say hit either way; ptxas says otherwise unless the kernel travelled with a new list."""
    ptxas = seeded.folder / "ptxas"
    ptxas.write_text("#!/bin/sh\n")
    ptxas.chmod(0o755)
    variables = {"FAKE_PTXAS": str(ptxas), "TRITON_CACHE_DIR": None}
    cold = fresh.call(_warm_looking_up, seeded.folder, "here", env=variables)
    (first,) = cold.targets
    assert "ptxas k.ptx -o k.cubin" in first.evidence.launched
    shutil.rmtree(seeded.folder / "here")
    warm = fresh.call(_warm_looking_up, seeded.folder, "there", env=variables)
    (second,) = warm.targets
    assert second.status == "restored"
    assert second.evidence.compiled_nothing
    assert warm.gave_up == ()
    restored = {path.name for path in (seeded.folder / "there" / "triton" / "HASH").iterdir()}
    assert restored == {"k.cubin", "k.json", "__grp__k.json"}
