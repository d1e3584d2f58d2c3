"""``python -m dflash_model.train``: trains a drafter on the hidden states of a target, in threads.

Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from compilecache.cli import DONE, FAULT, exit_code, fail, words_of
from compilecache.errors import CompileCacheError, WorkerFailed

if TYPE_CHECKING:
    from dflash_model.metrics import Summary


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Entry point: one JSON object on standard output, or one clear error and its exit code."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # a plan may name a workload of the folder one stands in
    options = parser().parse_args(words)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        print(train(options).json())
    except CompileCacheError as error:
        fail(_words_of(error), exit_code(_origin(error)), error)
    except KeyboardInterrupt:
        fail("interrupted; go on from the last checkpoint with --resume", 130)
    except Exception as error:
        fail(words_of(error), FAULT, error)
    sys.exit(DONE)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m dflash_model.train",
        description="Train a DFlash drafter: target threads make hidden states, drafter threads "
        "learn from them, and none of them compiles.",
        epilog="Example: python -m dflash_model.train --target Qwen3-4B --data rows.jsonl "
        "--plan plan.yaml --target-devices cuda:0 --drafter-devices cuda:1,cuda:2 --save out",
    )
    _add_inputs(made.add_argument_group("what"))
    _add_places(made.add_argument_group("where"))
    _add_training(made.add_argument_group("how"))
    _add_warming(made.add_argument_group("compile cache"))
    return made


def train(options: argparse.Namespace) -> Summary:
    """Warms, trains and gives the summary. Raises CompileCacheError."""
    from dflash_model.assembly import Assembly

    assembly = Assembly(options, _say)
    trainer = assembly.trainer()
    if options.no_warm:
        return trainer.run()
    with assembly.warm(trainer.drafters) as warm:
        _say(warm.report.table().rstrip())
        return trainer.run(warm)


def _add_inputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="local Hugging Face model"
    )
    group.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL or parquet with input_ids and, if wanted, loss_mask: token ids, no text",
    )
    group.add_argument("--plan", type=Path, metavar="FILE", help="planned shapes")
    group.add_argument(
        "--seq-lens", metavar="N,N", help="padded lengths, to plan --batch-size rows without a file"
    )
    drafter = group.add_mutually_exclusive_group()
    drafter.add_argument("--preset", metavar="NAME", help="size of the drafter [the plan's]")
    drafter.add_argument("--config", metavar="PATH", help="config.json of a drafter, or its folder")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of the drafter, such as anchors=64; repeatable",
    )
    group.add_argument(
        "--too-long",
        choices=("drop", "truncate", "error"),
        default="drop",
        help="what becomes of rows past the longest planned length [drop]",
    )


def _add_places(group: argparse._ArgumentGroup) -> None:
    for name, what in (("target", "a target thread"), ("drafter", "a replica of the drafter")):
        group.add_argument(
            f"--{name}-devices",
            default="cpu",
            metavar="D,D",
            help=f"one for each {what.partition(' ')[2]}: cuda:0,cuda:1 or cpu,cpu [cpu]",
        )
    group.add_argument("--save", type=Path, metavar="DIR", help="where checkpoints go [nowhere]")
    group.add_argument("--resume", type=Path, metavar="DIR", help="checkpoint to go on from")
    group.add_argument("--log", type=Path, metavar="FILE", help="JSONL, one object a step")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=_count, metavar="N", help="of the whole run [one pass]")
    group.add_argument(
        "--batch-size",
        type=_count,
        metavar="N",
        help="rows of a micro-batch [largest planned, or 1]",
    )
    group.add_argument(
        "--lr", type=_positive, default=6e-4, metavar="X", help="peak learning rate [6e-4]"
    )
    group.add_argument(
        "--warmup-ratio",
        type=_share,
        default=0.04,
        metavar="X",
        help="share of steps that rise [0.04]",
    )
    group.add_argument(
        "--clip", type=_positive, default=1.0, metavar="X", help="largest gradient norm [1.0]"
    )
    group.add_argument("--save-every", type=_count, metavar="N", help="steps [at the end only]")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of weights, order and anchors [0]"
    )
    group.add_argument(
        "--queue-size",
        type=_count,
        default=2,
        metavar="N",
        help="micro-batches that wait for each drafter [2]",
    )


def _add_warming(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--store", metavar="URL", help="artifact store, or 'none'")
    group.add_argument("--root", type=Path, metavar="DIR", help="cache root")
    group.add_argument("--strict", action="store_true", help="end the run on cache trouble")
    group.add_argument(
        "--on-miss",
        choices=("error", "serialize", "warn"),
        default="error",
        help="what happens when a thread would compile all the same [error]",
    )
    group.add_argument("--no-warm", action="store_true", help="compile nothing, train eagerly")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return value


def _origin(error: CompileCacheError) -> CompileCacheError:
    """The error that ended the run: of a failed thread, its own."""
    cause = error.__cause__
    if isinstance(error, WorkerFailed) and isinstance(cause, CompileCacheError):
        return cause
    return error


def _words_of(error: CompileCacheError) -> str:
    if not isinstance(error, WorkerFailed):
        return str(error)
    origin = _origin(error)
    if origin is not error:
        return f"{error.worker}: {origin}"
    return f"{error.problem}. Set COMPILECACHE_DEBUG=1 to see where"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _terminated(_signal: int, _frame: FrameType | None) -> NoReturn:
    # os.write: the signal may have come while standard error was being written to.
    os.write(2, b"error: terminated; go on from the last checkpoint with --resume\n")
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
