"""Several processes of one job: all are warm, or all stop, and the culprit is named."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import Template
from workloads import Fragile, Product, rows

from compilecache import ranks
from compilecache.ensure import ensure_warm
from compilecache.errors import CompileFailed
from compilecache.report import Report

WORLD = 3


def _join(folder: Path, rank: int, world: int = WORLD) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )


def _rank(folder: Path, rank: int, bad: int | None) -> Report | str:
    _join(folder, rank)
    model, count = (Fragile(), 3) if rank == bad else (Product(), 2)
    try:
        return ensure_warm(
            model, [rows(count)], store=False, root=folder / f"root{rank}",
            compile_options={"backend": "eager"}, strict=True, rank_timeout=120,
        ).report  # fmt: skip
    except CompileFailed as error:
        return f"{error.target}|{error}"


def test_all_ranks_are_warm(fresh: Template, tmp_path: Path) -> None:
    """They meet through the job's rendezvous, without a collective."""
    started = [fresh.start(_rank, tmp_path, rank, None) for rank in range(WORLD)]
    reports = [process.result() for process in started]
    assert all(isinstance(report, Report) and report.warm for report in reports)


def test_one_rank_that_fails_stops_all(fresh: Template, tmp_path: Path) -> None:
    """torchtitan#3898: it showed as a hang; now every rank names it before the first collective."""
    started = [fresh.start(_rank, tmp_path, rank, 1) for rank in range(WORLD)]
    told = [process.result() for process in started]
    assert "[3,8]" in str(told[1])
    for rank in (0, 2):
        assert str(told[rank]).startswith("rank 1|ranks [1] of 3 are not warm")
        assert "[3,8]" in str(told[rank])


def _agree(folder: Path, rank: int, wait: float, timeout: float) -> str:
    _join(folder, rank)
    time.sleep(wait)
    try:
        ranks.agree(None, timeout=timeout)
        ranks.agree(None, timeout=timeout)
    except CompileFailed as error:
        return str(error)
    return "agreed"


def test_a_rank_that_never_comes_is_named(fresh: Template, tmp_path: Path) -> None:
    """Within the time allowed, by those who wait for it."""
    started = [fresh.start(_agree, tmp_path, rank, 60 * (rank == 2), 1) for rank in range(WORLD)]
    for process in started[:2]:
        assert "ranks [2] of 3 did not finish" in str(process.result())
    started[2].kill()
    started[2].wait()


def test_a_rank_that_comes_late_is_waited_for(fresh: Template, tmp_path: Path) -> None:
    """Two calls one after the other do not mix."""
    started = [fresh.start(_agree, tmp_path, rank, 1.0 * (rank == 2), 60) for rank in range(WORLD)]
    assert [process.result() for process in started] == ["agreed"] * WORLD


@pytest.mark.parametrize("problem", [None, "not warm"])
def test_outside_a_job_there_is_nobody_to_tell(problem: str | None) -> None:
    """One process: nothing happens."""
    ranks.agree(problem, timeout=0)
