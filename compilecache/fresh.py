"""Runs a plan's targets in this fresh process and reports what that took: the inside of a proof.

Started by ``compilecache.proof`` as ``python -m compilecache.fresh REQUEST RESULT`` with the cache
root to prove in TORCHINDUCTOR_CACHE_DIR.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from itertools import chain
from pathlib import Path

import torch

from compilecache.cachedir import CacheDir
from compilecache.contents import TRANSIENT
from compilecache.engines.choice import engine_of
from compilecache.engines.harness import Run
from compilecache.errors import CompileCacheError, CompileFailed
from compilecache.fingerprint import Fingerprint, fingerprint
from compilecache.kernels import is_group
from compilecache.pipeline import walk
from compilecache.proof import Request, Result, Row, link_files
from compilecache.replicas import build_replicas
from compilecache.shapes import CompileTarget
from compilecache.workload import workload_of_plan


def run(request: Request) -> Result:
    """Every target, expected to be warm."""
    workload = workload_of_plan(request.plan)
    cache = CacheDir(request.root)
    cache.prepare()
    cache.use()
    plan, options = request.plan, request.plan.compile_options
    targets = plan.targets(request.devices)
    replicas = build_replicas(workload, request.devices)
    first = next(replicas)
    device = torch.device(first.device)
    mark = fingerprint(workload, first.module, device, options=options, engine=plan.engine)
    present = _fill(request, cache, mark, {target.key for target in targets})
    # After the fingerprint: it imports parts of torch in a thread, which another import might meet.
    engine = engine_of(plan.engine, workload, cache, options)

    def expected(target: CompileTarget) -> Collection[str]:
        return present.get(target.key, ())

    ran = walk(engine, chain([first], replicas), targets, expected)
    rows = tuple(_row(target, outcome, recorded=target.key in present) for target, outcome in ran)
    return Result(fingerprint=mark.dump(), rows=rows)


def _fill(
    request: Request, cache: CacheDir, mark: Fingerprint, keys: set[str]
) -> dict[str, list[str]]:
    """Copies what records say a restore would bring; everything, where they do not say.

    Returns the files of each target that has a record.
    """
    if request.source is None:
        return {}
    source = CacheDir(request.source)
    records = source.records(mark.digest)
    if keys <= records.keys():
        paths = {entry.path for key in keys for entry in records[key].files}
    else:
        paths = {path for path in source.files() if not TRANSIENT.search(path)}
    link_files(source.root, cache.root, sorted(path for path in paths if not is_group(path)))
    known = keys & records.keys()
    return {key: [entry.path for entry in records[key].files] for key in known}


def _row(target: CompileTarget, run: Run | CompileFailed, *, recorded: bool) -> Row:
    if isinstance(run, CompileFailed):
        return Row(target=target, error=str(run))
    files = tuple(sorted(run.files))
    notes = run.notes
    if notes and not recorded:
        notes = ("no program: the cache root has no record of the target",)
    return Row(target=target, evidence=run.evidence, files=files, engine=run.engine, notes=notes)


def main() -> None:
    """Entry point of the fresh process."""
    request = Request.model_validate_json(Path(sys.argv[1]).read_bytes())
    try:
        result = run(request)
    except CompileCacheError as error:
        result = Result(error=str(error))
    Path(sys.argv[2]).write_text(result.model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
