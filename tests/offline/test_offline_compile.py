"""Compiling without a GPU for real: needs a CUDA build of torch, and no GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import asking
import offline_models
import pytest
import torch
from processes import environment

from compilecache.artifact import Record
from compilecache.engines.programfile import Header, program_among, read_header
from compilecache.gpuprofile import GpuProfile, versions

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.offline,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is a CPU build"),
    pytest.mark.timeout(280),
]


def environ(**changes: str | None) -> dict[str, str]:
    """Of a process here."""
    base: dict[str, str | None] = {"TORCHINDUCTOR_COMPILE_THREADS": None}
    found = environment(**{**base, "TRITON_LIBCUDA_PATH": "/usr/lib/x86_64-linux-gnu", **changes})
    return {**found, "PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], str(HERE)])}


def python(*words: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """A fresh Python process; its errors are shown when a test fails."""
    ended = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environ(**changes), cwd=HERE
    )
    print(ended.stderr[-4000:], file=sys.stderr)
    return ended


class Place:
    """A plan, a store and cache roots."""

    def __init__(self, folder: Path, workload: str, phase: str = "train") -> None:
        self.folder = folder
        self.plan = folder / "plan.yaml"
        folder.mkdir(exist_ok=True)
        self.plan.write_text(offline_models.plan(workload, phase).dump())

    def words(self, root: str = "root", *more: str) -> list[str]:
        """``compilecache warm`` for an H200."""
        profile = GpuProfile.load("h200").model_copy(
            update=versions()
        )  # with whatever torch is here
        (self.folder / "h200.json").write_text(profile.dump())
        words = (
            "--gpu-profile",
            str(self.folder / "h200.json"),
            "--store",
            str(self.folder / "store"),
            "--json",
        )
        return ["warm", str(self.plan), *words, "--root", str(self.folder / root), *more]

    def warm(
        self, root: str = "root", *more: str, **changes: str | None
    ) -> subprocess.CompletedProcess[str]:
        """Runs it."""
        return python("-m", "compilecache", *self.words(root, *more), **changes)

    def rows(self, ended: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
        """Of its report."""
        assert ended.returncode == 0, ended.stderr
        found: list[dict[str, Any]] = json.loads(ended.stdout)["targets"]
        return found

    def record(self, root: str = "root") -> Record:
        """Of the one target."""
        (path,) = (self.folder / root).glob(".compilecache/records/*/*.json")
        return Record.parse(path.read_bytes())

    def files(self, root: str = "root") -> list[str]:
        """That travel."""
        return [entry.path for entry in self.record(root).files]

    def header(self, root: str = "root") -> Header:
        """Of its program."""
        path = program_among(self.files(root))
        assert path is not None
        return read_header(self.folder / root / path)


@pytest.fixture(scope="module")
def norm(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A model of several kernels, compiled forward and backward."""
    place = Place(tmp_path_factory.mktemp("norm"), "norm")
    (row,) = place.rows(place.warm())
    assert row["status"] == "compiled", row
    assert row["engine"] == "program"
    assert row["notes"] == [], row
    return place


def test_a_program_is_compiled_and_says_that_it_has_never_run(norm: Place) -> None:
    """The profile and nothing to compare with; gradients are on."""
    header = norm.header()
    assert header.profile is not None
    assert header.profile.name == "NVIDIA H200"
    assert header.hardware == "NVIDIA H200 sm_90, 132 processors"
    assert header.reference is None
    assert header.device == "cuda:0"


def test_nothing_travels_but_the_program_and_what_reaches_the_driver(norm: Place) -> None:
    """Graphs are in the program, and binaries in its graphs."""
    suffix = re.escape(str(sysconfig.get_config_var("EXT_SUFFIX")))
    for path in norm.files():
        assert re.fullmatch(rf"programs/.*|triton/[^/]+/cuda_utils{suffix}", path), path
    assert len(norm.files()) == 2


def test_another_root_restores_it_and_compiles_nothing(norm: Place) -> None:
    """In another process without a GPU; the fingerprint is the same."""
    (row,) = norm.rows(norm.warm("again"))
    assert row["status"] == "restored", row
    assert row["evidence"]["launches"] == 0
    assert norm.files("again") == norm.files()


def test_a_process_with_a_driver_finds_triton_s_library_and_builds_nothing(
    norm: Place, tmp_path: Path
) -> None:
    """Triton's own code looks it up and loads it, where no compiler works, with a driver of nothing."""
    (stub,) = (norm.folder / "root").rglob("cuda_utils*.so")
    listed = subprocess.run(["nm", "-D", "-u", stub], capture_output=True, text=True, check=True)
    wanted = re.findall(r"U (cu[A-Z]\w*)", listed.stdout)
    assert wanted
    source, driver = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in wanted))
    soname = f"-Wl,-soname,{driver.name}"
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", driver, soname], check=True)
    code = "import triton.backends.nvidia.driver as driver\nprint(driver.CudaUtils().load_binary)\n"
    changes = {"TRITON_CACHE_DIR": str(norm.folder / "root/triton"), "CC": "/bin/false"}
    ended = python("-c", code, LD_LIBRARY_PATH=str(tmp_path), **changes)
    assert "built-in" in ended.stdout, ended.stderr
    other = python("-c", code, **{**changes, "TRITON_CACHE_DIR": str(tmp_path / "empty")})
    assert other.returncode != 0  # with no library there it would have been built


def test_a_launcher_that_triton_needs_travels_too(tmp_path: Path) -> None:
    """Of a kernel that torch's own launcher does not take."""
    place = Place(tmp_path, "norm", "eval")
    (row,) = place.rows(place.warm(TORCHINDUCTOR_USE_STATIC_TRITON_LAUNCHER="0",
                                   TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER="0"))  # fmt: skip
    assert row["status"] == "compiled"
    names = [path.rpartition("/")[2].partition(".")[0] for path in place.files()]
    assert "cuda_utils" in names
    driver = importlib.import_module("triton.backends.nvidia.driver")
    assert ("__triton_launcher" in names) == hasattr(driver, "make_launcher")  # 3.8 needs none


def test_where_the_driver_s_folder_counts_it_has_to_be_named(tmp_path: Path) -> None:
    """Newer Tritons look for their library by it: then it is built, or it is said what to set."""
    place = Place(tmp_path, "norm", "eval")
    (row,) = place.rows(place.warm(TRITON_LIBCUDA_PATH=None))
    assert row["status"] == "compiled"
    built = any("cuda_utils" in path for path in place.files())
    assert built != any("TRITON_LIBCUDA_PATH" in note for note in row["notes"])


def test_kernels_of_many_operations_are_bundled_like_any_other(tmp_path: Path) -> None:
    """Their names would be longer than Triton's names of files: torch would not find the binary."""
    place = Place(tmp_path, "long", "eval")
    (row,) = place.rows(place.warm())
    assert row["notes"] == []
    assert not [path for path in place.files() if "launcher" in path]
    cubins = [path.stem for path in (tmp_path / "root/triton").rglob("*.cubin")]
    assert max(map(len, cubins)) > 100
    assert max(map(len, cubins)) < 150


def test_without_a_c_compiler_it_is_compiled_all_the_same_and_said(tmp_path: Path) -> None:
    """Whoever has the GPU builds Triton's library then."""
    place = Place(tmp_path, "norm", "eval")
    (row,) = place.rows(place.warm(CC="/nowhere/cc"))
    assert row["status"] == "compiled"
    assert "CudaUtils of Triton was not built here" in " ".join(row["notes"])
    assert [path for path in place.files() if path.endswith(".so")] == []


def test_a_step_in_autocast_is_compiled_in_autocast(tmp_path: Path) -> None:
    """What is in force round the call is in force where it is compiled."""
    place = Place(tmp_path, "autocast")
    place.rows(place.warm())
    assert place.header().state["autocast cuda"] == "torch.bfloat16"
    (row,) = place.rows(place.warm("again"))
    assert row["status"] == "restored", row


def test_a_program_that_no_longer_fits_is_compiled_anew_and_with_strict_an_error(
    norm: Place, tmp_path: Path
) -> None:
    """What a step is in counts, and no fingerprint knows of it."""
    place = Place(tmp_path, "switched")
    place.rows(place.warm())
    ended = place.warm("strict", "--strict", SWITCHED="1")
    assert ended.returncode == 3, ended.stderr
    assert "state.autocast cuda = off" in ended.stderr
    (row,) = place.rows(place.warm("again", SWITCHED="1"))
    assert row["status"] == "compiled", row
    assert place.header("again").state["autocast cuda"] == "torch.bfloat16"
    (row,) = place.rows(place.warm("third", SWITCHED="1"))
    assert row["status"] == "restored", row


def test_an_interrupted_warm_up_ends_its_process_and_goes_on_later(tmp_path: Path) -> None:
    """SIGTERM to the command; nothing of it lives on, no lock is held."""
    place = Place(tmp_path, "waiting")
    command = [sys.executable, "-m", "compilecache", *place.words()]
    with subprocess.Popen(command, env=environ(), cwd=HERE, stderr=subprocess.PIPE) as child:
        signal_file = tmp_path / "root" / "waiting"
        while not signal_file.exists():
            assert child.poll() is None
            time.sleep(0.05)
        child.terminate()
        assert child.wait(60) == 128 + signal.SIGTERM
    pid = int(signal_file.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    signal_file.unlink()
    (row,) = place.rows(place.warm(GO_ON="1"))
    assert row["status"] == "compiled"


def test_a_process_that_is_killed_is_told_from_one_that_fails(tmp_path: Path) -> None:
    """By its exit code; nothing is published."""
    place = Place(tmp_path, "norm")
    place.plan.write_text(
        place.plan.read_text().replace("offline_models:norm", "dying_models:norm")
    )
    ended = place.warm()
    assert ended.returncode == 1
    assert "ended with -9 before it could report" in ended.stderr
    assert not list((tmp_path / "store").rglob("*.json"))


# -- what is refused ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of every case."""
    folder = tmp_path_factory.mktemp("asking")
    changes = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_WORKER_START": "fork"}
    said: dict[str, str] = {}
    for words in ([case for case in asking.MODELS if case != "shared memory"], ["shared memory"]):
        ended = python(str(HERE / "asking.py"), str(folder), *words,
                       TORCHINDUCTOR_CACHE_DIR=str(folder), **changes)  # fmt: skip
        assert ended.returncode == 0
        said |= json.loads(ended.stdout.splitlines()[-1])
    return said


REFUSED = {
    "attention": ("scaled_dot_product_attention", "asking.py", "in forward"),
    "attention by its overload": ("scaled_dot_product_attention", "asking.py", "in forward"),
    "attention in a checkpoint": ("scaled_dot_product_attention", "asking.py", "in attend"),
    "attention written out": ("scaled_dot_product_attention", "asking.py", "in forward"),
    "operation without fake tensors": ("_transformer_encoder_layer_fwd", "asking.py", "in forward"),
    "attention, answered for another length": ("gpu-profile --plan", "asking.py", "in forward"),
    "unaligned product": ("mm, at", "asking.py", "shape_padding", "gpu-profile --plan"),
    "max-autotune": ("max_autotune",),
    "coordinate descent": ("coordinate_descent_tuning",),
    "CUDA graphs": ("triton.cudagraphs",),
    "own kernel": ("triton_kernel_wrapper", "own_kernel.py", "in forward"),
    "own kernel behind an operator": ("triton_kernel_wrapper", "own_kernel.py", "in forward"),
    "memory": ("torch.cuda.memory_allocated", "asking.py", "in ask"),
    "free memory": ("torch.cuda.mem_get_info", "asking.py", "in ask"),
    "devices": ("torch.cuda.device_count", "asking.py", "in ask"),
    "stream": ("torch.cuda.current_stream", "asking.py", "in ask"),
    "random state": ("torch.cuda.get_rng_state", "asking.py", "in ask"),
    "seconds": ("time kernels on the GPU", "asking.py", "in ask"),
    "shared memory": ("triton_", "asking.py", "shared memory"),
}


@pytest.mark.parametrize("case", asking.MODELS)
def test_what_only_a_gpu_can_say_is_refused_with_operation_and_line(
    refusals: dict[str, str], case: str
) -> None:
    """The line is one that asks; what needs no answer is compiled."""
    said = refusals[case]
    if case not in REFUSED:
        assert said == "", said
        return
    assert said, case
    for word in REFUSED[case]:
        assert word in said, said
    for name, number in re.findall(r"(\w+\.py):(\d+) in ", said):
        line = (HERE / name).read_text().splitlines()[int(number) - 1]
        assert line.endswith("# asks") or case == "shared memory", said
