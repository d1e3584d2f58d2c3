"""One fresh process of the incident's replay; prints one JSON object a line.

``naive``: threads step through the shapes, compiling as they go. ``script``: one short forward pass
per device, no thread, no backward. ``limit``: compiled flex attention meets more lengths than torch
keeps entries for. ``ours``: ensure_warm, then for every line on standard input one burst of training
by a target thread and a drafter thread per replica.
"""

from __future__ import annotations

import argparse
import json
import logging
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import mean

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from compilecache import Warm, WorkerFailed, ensure_warm
from compilecache.guard import hooks
from compilecache.guard.attempt import Attempt
from compilecache.guard.crew import Crew
from compilecache.shapes import plan_of
from dflash_model.anchors import sample_anchors
from dflash_model.masks import BlockLayout, BlockMasks, block_mask_of, build_mask_mod
from dflash_model.model import Drafter
from dflash_model.workload import DFlashWorkload, dflash

FX = "FX to symbolically trace"
"""Of the error that the incident's runs died of."""
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of the Qwen3-4B drafter."""
POLL_SECONDS = 0.1
QUEUED = 2
"""Micro-batches that wait for a drafter."""


@dataclass(frozen=True)
class Input:
    """A padded row and what a target made of it, on the drafter's device."""

    input_ids: Tensor
    hidden_states: Tensor
    loss_mask: Tensor
    number: int

    def step(self, drafter: Drafter) -> float:
        """Forward and backward; the length in tokens."""
        chance = torch.Generator().manual_seed(self.number)
        batch = drafter.prepare(
            self.input_ids, self.hidden_states, self.loss_mask, generator=chance
        )
        torch.autograd.backward(drafter(**batch))
        return self.input_ids.shape[1]


class SyntheticTarget:
    """Makes hidden states as a target would, by one matrix product on its own device."""

    def __init__(self, drafter: Drafter, device: str, longest: int) -> None:
        config = drafter.config
        chance = torch.Generator(device).manual_seed(0)
        made = {"generator": chance, "device": device, "dtype": drafter.fc.weight.dtype}
        self._embedded = torch.randn(longest, config.hidden_size, **made)
        self._layers = torch.randn(config.hidden_size, config.context_size, **made)
        self._layers *= config.hidden_size**-0.5
        self._vocab = config.vocab_size

    @torch.no_grad()
    def make(self, number: int, length: int, device: torch.device) -> Input:
        """The row of that number."""
        chance = torch.Generator().manual_seed(number)
        hidden = (self._embedded[:length] @ self._layers).unsqueeze(0).to(device)
        ids = torch.randint(self._vocab, (1, length), generator=chance).to(device)
        return Input(ids, hidden, torch.ones_like(ids, dtype=torch.bool), number)


@dataclass
class Rounds:
    """Rounds of one thread over all shapes, so that one is like the other."""

    device: torch.device
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Most bytes that the device held in each round; empty on a CPU."""

    @contextmanager
    def one(self) -> Iterator[None]:
        """Measures a round, whatever happens in it."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self.tokens.append(0.0)
        began = time.perf_counter()
        yield
        if on_gpu:
            torch.cuda.synchronize(self.device)
            self.peaks.append(torch.cuda.max_memory_allocated(self.device))
        self.seconds.append(time.perf_counter() - began)

    @property
    def rate(self) -> float:
        """Tokens a second after the first round."""
        return sum(self.tokens[1:]) / max(sum(self.seconds[1:]), 1e-9)

    @property
    def spread(self) -> float | None:
        """Most to least peak memory of the rounds after the first."""
        return max(self.peaks[1:]) / min(self.peaks[1:]) if self.peaks[1:] else None


def together(rounds: list[Rounds]) -> dict[str, float | None]:
    """What all threads did; where they share a device, their memory cannot be told apart."""
    alone = len({one.device for one in rounds}) == len(rounds)
    spreads = [one.spread for one in rounds if alone and one.spread is not None]
    peaks = [peak for one in rounds for peak in one.peaks]
    return {
        "tokens_per_second": sum(one.rate for one in rounds),
        "memory_spread": max(spreads, default=None),
        "peak_gb": max(peaks) / 2**30 if peaks else None,
    }


# -- controls ---------------------------------------------------------------------------------


@dataclass
class Watcher:
    """Hears of every compilation and every uncompiled flex call, and lets them happen."""

    compiles: int = 0
    concurrent: int = 0
    """Begun while another thread was compiling, or waiting to."""
    dense: int = 0
    _inside: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def attempt(self, attempt: Attempt) -> Iterator[None]:
        """Part of the hooks' listener."""
        me = threading.get_ident()
        with self._lock:
            self.dense += attempt.kind == "dense"
            if attempt.kind in ("compile", "backward"):
                self.compiles += 1
                self.concurrent += any(n for other, n in self._inside.items() if other != me)
            self._inside[me] += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[me] -= 1


def naive(options: argparse.Namespace) -> None:
    """A thread for each replica, whole models compiled, cold, nothing done beforehand."""
    workload = workload_of(options)
    drafters = [built(workload, device) for device in options.devices]
    longest = max(options.seq_lens)
    targets = [
        SyntheticTarget(d, n, longest) for d, n in zip(drafters, options.devices, strict=True)
    ]
    rounds = [Rounds(torch.device(device)) for device in options.devices]
    failed: list[str] = []

    def train(place: int) -> None:
        drafter, target, mine = drafters[place], targets[place], rounds[place]
        use(mine.device)
        for turn in range(options.rounds):
            with mine.one():
                for length in options.seq_lens:
                    given = target.make(turn, length, mine.device)
                    try:
                        mine.tokens[-1] += given.step(drafter)
                    except Exception as error:  # the run would be over here; count on instead
                        failed.append(words_of(error))
                    drafter.zero_grad(set_to_none=True)

    watcher = Watcher()
    with hooks.listening(watcher):
        threads = [threading.Thread(target=train, args=(place,)) for place in range(len(drafters))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    say(
        steps=len(drafters) * options.rounds * len(options.seq_lens),
        failures=len(failed),
        fx_failures=sum(FX in text for text in failed),
        errors=Counter(failed).most_common(3),
        compiles=watcher.compiles,
        concurrent=watcher.concurrent,
        dense=watcher.dense,
        **together(rounds),
    )


def built(workload: DFlashWorkload, device: str) -> Drafter:
    """A replica, compiled as one would without a plan."""
    drafter = workload.build(torch.device(device))
    for function in workload.functions(drafter).values():
        function.compile(dynamic=False)
    return drafter


def script(options: argparse.Namespace) -> None:
    """The incident's warm-up script: device after device, one short forward pass."""
    workload = workload_of(options)
    for name in dict.fromkeys(options.devices):
        device = torch.device(name)
        use(device)
        drafter = built(workload, name)
        length = min(options.seq_lens)
        given = SyntheticTarget(drafter, name, length).make(0, length, device)
        with torch.no_grad():
            drafter(**drafter.prepare(given.input_ids, given.hidden_states, given.loss_mask))
    say(ran=len(set(options.devices)))


@dataclass(frozen=True)
class LengthCost:
    """One length after its first call."""

    length: int
    milliseconds: float
    peak_gb: float | None


def limit(options: argparse.Namespace) -> None:
    """Compiled flex attention alone, length after length, with torch's default limit."""
    device = torch.device(options.devices[0])
    use(device)
    attention = torch.compile(flex_attention, dynamic=False)
    watcher = Watcher()
    costs = []
    with hooks.listening(watcher):
        for length in options.seq_lens:
            costs.append(length_cost(attention, length, options.anchors, device))
            print(asdict(costs[-1]), file=sys.stderr, flush=True)
    kept = torch._dynamo.config.recompile_limit
    within, beyond = costs[:kept], costs[kept:]
    say(
        slowdown=mean(c.milliseconds for c in beyond) / mean(c.milliseconds for c in within),
        within_ms=mean(c.milliseconds for c in within),
        beyond_ms=mean(c.milliseconds for c in beyond),
        within_gb=largest(within),
        beyond_gb=largest(beyond),
        compiles=watcher.compiles,
        dense=watcher.dense,
    )


def largest(costs: list[LengthCost]) -> float | None:
    """Most memory of all lengths."""
    return max((c.peak_gb for c in costs if c.peak_gb is not None), default=None)


def length_cost(attention: object, length: int, anchors: int, device: torch.device) -> LengthCost:
    """Forward, and on a GPU backward: flex has none on a CPU."""
    mask = dflash_mask(length, anchors, device)
    inputs = attention_inputs(length, anchors, device)

    def once() -> None:
        with torch.set_grad_enabled(device.type == "cuda"):
            out = attention(*inputs, block_mask=mask, enable_gqa=True)  # type: ignore[operator]
            if device.type == "cuda":
                torch.autograd.backward(out.sum())
                torch.cuda.synchronize(device)

    once()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runs = 3
    began = time.perf_counter()
    for _ in range(runs):
        once()
    took = (time.perf_counter() - began) / runs * 1e3
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return LengthCost(length, took, peak)


def attention_inputs(length: int, anchors: int, device: torch.device) -> list[Tensor]:
    """Queries, keys and values of one layer of the Qwen3-4B drafter."""
    queries = anchors * 16
    sizes = [(HEADS, queries), (KV_HEADS, length + queries), (KV_HEADS, length + queries)]
    on_gpu = device.type == "cuda"
    made = {"device": device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    return [
        torch.randn(1, heads, count, HEAD_DIM, **made).requires_grad_(on_gpu)  # type: ignore[call-overload]
        for heads, count in sizes
    ]


@torch.no_grad()
def dflash_mask(length: int, anchors: int, device: torch.device) -> BlockMask:
    """The mask of one row, its tiles found eagerly."""
    drawn, keep = sample_anchors(torch.ones(1, length, device=device), anchors)
    layout = BlockLayout(length, 16, drawn, keep)
    mod, sizes = build_mask_mod(layout), {"q_len": layout.q_len, "kv_len": layout.kv_len}
    tiles = BlockMasks()(mod, batch=1, device=device, **sizes)
    return block_mask_of(tiles, mod, **sizes)


# -- ours -------------------------------------------------------------------------------------


def ours(options: argparse.Namespace) -> None:
    """Warms, tells how, and trains whenever asked."""
    workload = workload_of(options)
    specs = workload.specs(options.seq_lens, batch_sizes=[1], phases=["train"])
    if options.devices[0] == "cpu":  # training on a CPU needs no block masks
        specs = [spec for spec in specs if spec.function == "forward"]
    drafters = [workload.build(torch.device(device)) for device in options.devices]
    with ensure_warm(drafters, plan_of(specs), store=options.store, root=options.root) as warm:
        kinds = Counter(row.status for row in warm.report.targets)
        say(seconds=warm.report.seconds, status=kinds, gave_up=warm.report.gave_up)
        training = Training(warm, drafters, options)
        for _ in sys.stdin:
            say(**training.burst())


class Training:
    """A target thread, a drafter thread for each replica, and queues between them."""

    def __init__(self, warm: Warm, drafters: list[Drafter], options: argparse.Namespace) -> None:
        self._warm = warm
        self._drafters = drafters
        self._lengths: list[int] = options.seq_lens
        self._rounds = max(2, -(-options.steps // len(self._lengths)))
        self._target_device = options.target_device
        self._target = SyntheticTarget(drafters[0], options.target_device, max(self._lengths))
        self._optimizers = [
            torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-5)
            for one in drafters
        ]

    def burst(self) -> dict[str, object]:
        """Trains for some rounds; the first one does not count for rate and memory."""
        rounds = [Rounds(drafter.fc.weight.device) for drafter in self._drafters]
        crashes: list[str] = []
        try:
            with self._warm.crew() as crew:
                inboxes = [queue.Queue[Input](QUEUED) for _ in rounds]
                crew.start(self._feed, crew, inboxes, name="target")
                for place, mine in enumerate(rounds):
                    crew.start(
                        self._train, crew, place, inboxes[place], mine, device=str(mine.device)
                    )
        except WorkerFailed as error:
            crashes.append(str(error)[:400])
        return {
            "steps": len(rounds) * self._rounds * len(self._lengths),
            "crashes": len(crashes),
            "errors": crashes,
            "compiles": self._warm.compiles_after_prime,
            "dense": self._warm.dense_steps,
            **together(rounds),
        }

    def _feed(self, crew: Crew, inboxes: list[queue.Queue[Input]]) -> None:
        use(torch.device(self._target_device))
        for number in range(self._rounds * len(self._lengths)):
            for place, inbox in enumerate(inboxes):
                length = self._lengths[(number + place) % len(self._lengths)]
                device = self._drafters[place].fc.weight.device
                given = self._target.make(number, length, device)
                if given.hidden_states.is_cuda:
                    torch.cuda.synchronize(self._target_device)
                waiting(crew, lambda inbox=inbox, given=given: inbox.put(given, True, POLL_SECONDS))

    def _train(self, crew: Crew, place: int, inbox: queue.Queue[Input], mine: Rounds) -> None:
        drafter, optimizer = self._drafters[place], self._optimizers[place]
        drafter.train()
        for _ in range(self._rounds):
            with mine.one():
                for _ in self._lengths:
                    given = waiting(crew, lambda: inbox.get(True, POLL_SECONDS))
                    with self._warm.step():
                        mine.tokens[-1] += given.step(drafter)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)


def waiting(crew: Crew, move: object) -> Input:
    """Repeats a move of a queue until it succeeds. Raises WorkerFailed when another thread failed."""
    while True:
        crew.check()
        try:
            return move()  # type: ignore[operator, no-any-return]
        except (queue.Empty, queue.Full):
            continue


# -- all --------------------------------------------------------------------------------------


def workload_of(options: argparse.Namespace) -> DFlashWorkload:
    """The drafter's."""
    return dflash(preset=options.preset, anchors=options.anchors)


def use(device: torch.device) -> None:
    """Makes a GPU the current one of this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def words_of(error: Exception) -> str:
    """Type and first line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}"


def say(**facts: object) -> None:
    """One JSON object for the parent."""
    print(json.dumps(facts), flush=True)


def main() -> None:
    """Runs one variant."""
    variants = {"naive": naive, "script": script, "limit": limit, "ours": ours}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", choices=variants)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--anchors", type=int, required=True)
    parser.add_argument("--devices", type=lambda text: text.split(","), required=True)
    parser.add_argument("--seq-lens", type=lambda t: [int(n) for n in t.split(",")], required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--target-device", default="cpu")
    parser.add_argument("--root")
    parser.add_argument("--store")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.INFO)
    variants[options.variant](options)


if __name__ == "__main__":
    main()
