"""Warming for a GPU that is not there: what is refused at once, and what travels; no CUDA needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from offline_models import plan
from processes import environment

from compilecache import absent_context, absent_driver, absent_gpu, fingerprint
from compilecache.cachedir import CacheDir
from compilecache.child import Failure
from compilecache.cli.warm import warm as warm_command
from compilecache.engines.programfile import Header, read_program, sealed, write_program
from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    CompileFailed,
    FingerprintMismatch,
    LockTimeout,
    PlanError,
    StoreUnavailable,
    UntrustedArtifact,
)
from compilecache.exchange import Exchange
from compilecache.gpuprofile import GpuProfile
from compilecache.offline import Request, refuse_plan, warm_offline
from compilecache.shapes import CompileTarget, InputSpec
from compilecache.store import ArtifactStore

H200 = GpuProfile.load("h200")
HERE = Path(__file__).parent
CPU_BUILD = torch.version.cuda is None


def warm(folder: Path, engine: str, *words: str) -> subprocess.CompletedProcess[str]:
    """``compilecache warm`` without a GPU."""
    path = folder / "plan.yaml"
    path.write_text(plan("norm").dump())
    command = [sys.executable, "-m", "compilecache", "warm", str(path), "--engine", engine]
    words = (*words, "--root", str(folder / "root"), "--store", str(folder / "store"))
    environ = environment()
    environ["PYTHONPATH"] = os.pathsep.join([environ["PYTHONPATH"], str(HERE)])
    return subprocess.run([*command, *words], capture_output=True, text=True, env=environ)


def compiled(folder: Path) -> list[Path]:
    """What a warm-up left in root and store."""
    found = [*(folder / "root").rglob("*.program"), *(folder / "store").rglob("*")]
    return [path for path in found if path.is_file()]


def test_a_plan_for_engine_trace_is_refused_before_anything_starts() -> None:
    """It runs what it compiles."""
    traced = plan("norm").model_copy(update={"engine": "trace"})
    with pytest.raises(PlanError, match="engine 'trace'") as caught:
        refuse_plan(traced)
    assert caught.value.field == "engine"
    with pytest.raises(PlanError, match="engine 'trace'"):
        warm_offline(Request(plan=traced, profile=H200, root=Path("/nowhere"), store="none"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu-profile", "b300"), "GPU profile 'b300' cannot be read"),
        (("--gpu-profile", "h200", "--device", "cuda:1"), "--device"),
        (("--gpu-profile", "h200", "--verify"), "--verify"),
    ],
)
def test_what_does_not_go_with_a_profile_is_refused(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    """Exit code 2, nothing compiled."""
    ended = warm(tmp_path, "program", *words)
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert compiled(tmp_path) == []


@pytest.mark.skipif(not CPU_BUILD, reason="this torch is a CUDA build")
def test_a_cpu_build_of_torch_is_refused_in_the_process_that_would_compile(tmp_path: Path) -> None:
    """Its error is this command's error: field, next step, exit code."""
    ended = warm(tmp_path, "program", "--gpu-profile", "h200")
    assert ended.returncode == 2, ended.stderr
    assert "this torch has no CUDA" in ended.stderr
    assert "Install the CUDA build of torch" in ended.stderr
    assert compiled(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        PlanError("a", next_step="b", field="cuda"),
        CompileFailed("a", next_step="b", target="forward train"),
        ChecksumMismatch("a", next_step="b", faults=("x: other bytes",)),
        FingerprintMismatch("a", next_step="b", changed={"torch": ("1", "2")}),
        LockTimeout("a", next_step="b", holder="me"),
        StoreUnavailable("a", next_step="b"),
        UntrustedArtifact("a", next_step="b"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_process_are_raised_here(error: CompileCacheError) -> None:
    """The same class with the same fields, over JSON."""
    sent = Failure.model_validate_json(Failure.of(error).model_dump_json())
    again = sent.error()
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


# -- probes -------------------------------------------------------------------------------------


def test_what_this_torch_lacks_is_named_as_import_paths() -> None:
    """A CPU build lacks Triton, and nothing of torch itself."""
    found = absent_gpu.missing()
    assert all(name.startswith(("triton.", "torch.", "at::")) for name in found)
    lacking = {name for name in found if not name.startswith("triton.")}
    assert lacking == set()
    if CPU_BUILD:
        assert "triton.backends.nvidia.driver.CudaUtils" in absent_driver.missing()


def test_the_function_of_the_context_is_found_in_the_header_that_torch_ships() -> None:
    """Its place among the virtual functions is counted, not guessed."""
    assert absent_context.missing() == []
    slot = absent_context._slot()
    assert slot is not None
    assert 2 < slot < 64


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.cuda", "_exchange_device"),
        ("torch.cuda", "_lazy_init"),
        ("torch._inductor.fx_passes.pad_mm", "get_cached_should_pad"),
        ("torch._inductor.graph", "GraphLowering"),
    ],
)
def test_a_torch_without_a_name_is_refused_readably(module: str, name: str) -> None:
    """In a process of its own, whose torch has lost it."""
    code = (
        f"import importlib\nvars(importlib.import_module({module!r})).pop({name!r}, None)\n"
        "import sys; sys.modules.pop('torch._dynamo', None)\n"
        "from compilecache import absent_gpu\n"
        "from compilecache.errors import PlanError\n"
        "from compilecache.gpuprofile import GpuProfile\n"
        "try:\n    absent_gpu.install(GpuProfile.load('h200'))\n"
        "except PlanError as error:\n    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert "this torch has no" in ended.stdout, ended.stderr
    assert f"{module}.{name}" in ended.stdout
    assert "docs/offline-compile.md" in ended.stdout


# -- what travels ---------------------------------------------------------------------------------


def header(data: bytes, profile: GpuProfile | None) -> Header:
    """Of a program."""
    return Header(
        spec=InputSpec(phase="train", dims={"batch": 2}),
        device="cuda:0",
        hardware="NVIDIA H200 sm_90, 132 processors",
        torch="2",
        parameters="none",
        sources={},
        imports={},
        state={},
        conditions=(),
        profile=profile,
        **sealed(data),
    )


@pytest.mark.parametrize("profile", [H200, None], ids=["never run", "settled"])
def test_a_program_says_whether_it_has_run_on_a_gpu(
    tmp_path: Path, profile: GpuProfile | None
) -> None:
    """By the profile in its header, which comes back field by field."""
    written = header(b"function", profile)
    path = write_program(tmp_path, written, b"function")
    assert read_program(tmp_path / path) == (written, b"function")
    assert read_program(tmp_path / path)[0].profile == profile


def test_a_header_of_before_there_were_profiles_is_read() -> None:
    """Its program has run where it was compiled."""
    older = json.loads(header(b"", None).model_dump_json())
    del older["profile"]
    assert Header.model_validate_json(json.dumps(older)).profile is None


def test_a_program_is_looked_up_alike_with_and_without_its_gpu() -> None:
    """Driver and CPU do not count for a program; for engine trace they do, and for a CPU."""
    gpu = {"device": "cuda", "gpu": "NVIDIA H200 sm_90", "cpu": "x86_64 AVX2"}
    here = {**gpu, "cpu.flags": "avx2", "driver": "unknown"}
    there = {**gpu, "cpu": "x86_64 AVX512", "cpu.flags": "avx512f", "driver": "575.57.08"}
    assert here != there
    kept = fingerprint._without_host(here)
    assert kept == fingerprint._without_host(there)
    assert kept.keys() == {"device", "gpu", "cpu"}
    other = fingerprint._without_host({**there, "gpu": "NVIDIA H100 sm_90"})
    assert kept != other
    cpu = {"device": "cpu", "cpu": "x86_64 AVX2", "cpu.flags": "avx2"}
    assert fingerprint._without_host(cpu) == cpu


# -- first contacts ---------------------------------------------------------------------------------


MARK = fingerprint.Fingerprint({"gpu": "NVIDIA H200 sm_90"})
TARGET = CompileTarget(InputSpec(phase="train", dims={"batch": 2}), "cuda:0")


def pod(folder: Path, store: ArtifactStore) -> Exchange:
    """A start with an empty root; it has what the store has."""
    cache = CacheDir(folder)
    cache.prepare()
    exchange = Exchange(cache, store, MARK, [TARGET.key])
    assert exchange.restore().faults == []
    return exchange


def program(exchange: Exchange, words: bytes, profile: GpuProfile | None) -> str:
    """A program in a pod's root."""
    return write_program(exchange.cache.root, header(words, profile), words)


def test_of_pods_that_meet_the_gpu_at_once_one_publishes(tmp_path: Path) -> None:
    """The others keep what they have settled, and publish it neither now nor later."""
    store = ArtifactStore.open(tmp_path / "store")
    ci = pod(tmp_path / "ci", store)
    first = ci.publish(TARGET, [program(ci, b"made", H200)], None)
    one, two = pod(tmp_path / "one", store), pod(tmp_path / "two", store)
    assert not one.superseded(TARGET.key)
    second = one.publish(TARGET, [program(one, b"settled by one", None)], None)
    assert second.generation == first.generation + 1
    assert two.superseded(TARGET.key)
    own = program(two, b"settled by two", None)
    two.keep(TARGET, [own], None)
    assert [entry.path for entry in two.complete[TARGET.key].files] == [own]
    assert two.publish_complete([TARGET.key]) == []
    assert store.highest_generation(MARK.digest, TARGET.key) == second.generation
    again = Exchange(two.cache, store, MARK, [TARGET.key])
    assert again.look() == []
    assert [entry.path for entry in again.complete[TARGET.key].files] == [own]
    assert pod(tmp_path / "three", store).complete[TARGET.key].files == second.files


def test_a_store_that_is_gone_is_no_reason_to_lose_what_was_settled(tmp_path: Path) -> None:
    """It counts as not superseded; publishing keeps the record in the root, and says what is wrong."""
    store = ArtifactStore.open(tmp_path / "store")
    ci = pod(tmp_path / "ci", store)
    ci.publish(TARGET, [program(ci, b"made", H200)], None)
    one = pod(tmp_path / "one", store)
    (tmp_path / "store").rename(tmp_path / "gone")
    (tmp_path / "store").write_text("no folder")
    assert not one.superseded(TARGET.key)
    own = program(one, b"settled by one", None)
    with pytest.raises((StoreUnavailable, OSError)):
        one.publish(TARGET, [own], None)
    assert [entry.path for entry in one.complete[TARGET.key].files] == [own]
    assert TARGET.key in one.cache.unpublished(MARK.digest)


def test_what_the_command_is_told_reaches_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option that means anything there."""
    asked: list[Request] = []

    def noting(request: Request) -> None:
        asked.append(request)
        raise PlanError("asked", next_step="enough")

    monkeypatch.setattr("compilecache.offline.warm_offline", noting)
    path = tmp_path / "plan.yaml"
    path.write_text(plan("norm").dump())
    words = ["--limit", "5000", "--lock-timeout", "7", "--no-share", "--strict", "--store", "none"]
    options = [str(path), "--gpu-profile", "h200", "--root", str(tmp_path / "root"), *words]
    CliRunner().invoke(warm_command, options)
    (request,) = asked
    said = (request.limit, request.lock_timeout, request.share, request.strict, request.store)
    assert said == (5000, 7.0, False, True, "none")
    assert request.profile == H200
