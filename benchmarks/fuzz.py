"""What the parsers of records, plans, packs, claims, tags, key files and fingerprints do with broken input.

Valid samples are changed in fields, tar headers, zstd frames, YAML lines and bytes. Each input must be read, or
refused with an error of ours that ends with the next step; nothing may be left behind or written outside of
the folder, none may take more than 5 s, and no process may grow by more than 256 MiB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# The tests try the same inputs.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "tests", "tests/faults"))

from fuzzing import MOST_BYTES, MOST_SECONDS, Tally, fuzz
from parsers import SHARES
from results import Row, table, write

INPUTS = 100_000
SHARD = 2_500
"""Inputs of one process."""


def main() -> None:
    """Tries and reports; leaves with 1 when anything crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--inputs", type=int, default=INPUTS, help=f"in all (default {INPUTS})")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default 1)")
    parser.add_argument(
        "--only", metavar="KIND:N", help="one input, for its traceback; writes no result"
    )
    options = parser.parse_args()
    if options.only:
        kind, _, number = options.only.partition(":")
        print(fuzz(kind, options.seed, range(int(number), int(number) + 1)))
        return
    tallies = run(options.inputs, options.seed)
    for tally in tallies.values():
        print(*tally.crashes, sep="\n", end="", file=sys.stderr)
    rows = [*summed(tallies, options.inputs), *by_kind(tallies)]
    path = write("fuzz", rows, how={"seed": options.seed, "inputs of one process": SHARD})
    print(path.read_text(encoding="utf-8") if options.json else table(rows), end="")
    sys.exit(any(tally.crashes for tally in tallies.values()))


def run(inputs: int, seed: int) -> dict[str, Tally]:
    """What came of each kind; a shard is a process of its own, which shows how much it grew."""
    tallies = {kind: Tally() for kind in SHARES}
    shards = list(_shards(inputs, seed))
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        done = pool.imap_unordered(_one, shards, chunksize=1)
        for count, (kind, tally) in enumerate(done, 1):
            tallies[kind].add(tally)
            print(f"{count} of {len(shards)} shards", file=sys.stderr)
    return tallies


def _shards(inputs: int, seed: int) -> Iterator[tuple[str, int, range]]:
    for kind, share in SHARES.items():
        count = -(-inputs * share // 100)
        for start in range(0, count, SHARD):
            yield kind, seed, range(start, min(start + SHARD, count))


def _one(shard: tuple[str, int, range]) -> tuple[str, Tally]:
    return shard[0], fuzz(*shard)


def summed(tallies: Mapping[str, Tally], asked: int) -> list[Row]:
    """All kinds together."""
    everything = Tally()
    for tally in tallies.values():
        everything.add(tally)
    inputs, crashes = everything.inputs, len(everything.crashes)
    slowest, grown = round(everything.slowest, 3), round(everything.grown / 2**20, 1)
    return [
        Row("fuzz_inputs", inputs, "inputs", "asked for", inputs / asked, asked, ">= 1", inputs >= asked),
        Row("fuzz_crashes", crashes, "inputs", target="<= 0", passed=crashes == 0),
        Row("fuzz_slowest_s", slowest, "s", target=f"<= {MOST_SECONDS:g}", passed=slowest <= MOST_SECONDS),
        Row(
            "fuzz_growth_mb", grown, "MiB", target=f"<= {MOST_BYTES >> 20}",
            passed=everything.grown <= MOST_BYTES,
        ),
    ]  # fmt: skip


def by_kind(tallies: Mapping[str, Tally]) -> Iterator[Row]:
    """How many were tried of each, and what share was read after all."""
    for kind, tally in tallies.items():
        share = round(tally.accepted / max(1, tally.inputs), 3)
        yield Row(f"fuzz_inputs_{kind}", tally.inputs, "inputs")
        yield Row(f"fuzz_read_{kind}", tally.accepted, "inputs", "inputs", share)


if __name__ == "__main__":
    main()
