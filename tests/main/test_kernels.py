"""What of Triton's cache travels, and how it is made usable in another root."""

from __future__ import annotations

import json
from pathlib import Path

from compilecache.cachedir import travels
from compilecache.kernels import is_group, is_stub, kernel_folder, looked_up, regroup


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
