"""Replays the incident: what crashes or crawls without a warm cache, and the same run with one.

Four variants, each in fresh processes on an empty compile cache of its own:
a  naive    threads train replicas, whole models compiled as they go
b  script   a script ran one short forward pass per device; then the same as a
c  limit    compiled flex attention, 12 lengths, torch's default limit of entries
d  ours     one process warms alone and publishes; the cache is deleted; another restores it, and
            both train in threads, in turn: a target thread and a drafter thread per replica
The first round over all lengths counts neither for tokens/s nor for memory. A compilation is
concurrent when it began while another thread was compiling or waiting to. Exits with 1 when a
control does not fail, since the replay proves nothing then, or when ours does. On several GPUs a
must meet torch's own error; elsewhere, and for b, compiling at once counts as failing too.
Usage: incident_replay.py [--device cpu|cuda] [--preset tiny|qwen3-4b] [--seq-lens 128,256]
[--only a,c] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from results import Row, report, table

HERE = Path(__file__).parent
SLOW = 1.5
"""A slowdown past the recompile limit that counts as one."""
LENGTHS_PAST_LIMIT = 12
TITLES = {"a": "a naive threads", "b": "b script, then a", "c": "c default limit"}

Answer = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What every variant runs with."""

    preset: str
    anchors: int
    controls: list[str]
    """Devices of the naive replicas, one thread each."""
    control_lengths: list[int]
    target: str
    """Device of ours' target thread."""
    drafters: list[str]
    """Devices of ours' drafter threads."""
    lengths: list[int]
    limit_anchors: int
    limit_lengths: list[int]
    """The last four lie in the middle of the others, so that their mean is like the others'."""
    rounds: int
    steps: int
    repeats: int
    deadline: float

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU run."""
        return self.target != "cpu"


class Process:
    """One worker; killed when it does not answer in time, which reads as no answer."""

    def __init__(self, variant: str, cache: Path, deadline: float, **options: object) -> None:
        self._deadline = deadline
        words = [sys.executable, str(HERE / "incident_worker.py"), variant]
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", joined(value)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(cache)
        )
        self.hung = False

    def answer(self) -> Answer | None:
        """The next answer; None when the process ended or hung."""
        timer = threading.Timer(self._deadline, self._kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("{"):
                    return json.loads(line)  # type: ignore[no-any-return]
            return None
        finally:
            timer.cancel()

    def ask(self) -> Answer | None:
        """One more burst."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("train\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Lets it end, or ends it."""
        if kind is not None:
            self._process.kill()
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(60, self._kill)
        timer.start()
        self._process.stdin.close()
        self._process.wait()
        timer.cancel()
        self._process.stdout.close()

    @property
    def code(self) -> int:
        """Its exit status; negative after a signal."""
        return self._process.wait()

    def _kill(self) -> None:
        self.hung = True
        self._process.kill()


def joined(value: object) -> str:
    """An option's words."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def environment(cache: Path) -> dict[str, str]:
    """With the compile cache there."""
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }


@contextmanager
def empty_cache() -> Iterator[Path]:
    """A directory that nothing was compiled into."""
    root = Path(tempfile.mkdtemp(prefix="incident-"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def once(variant: str, root: Path, setting: Setting, **options: object) -> Answer:
    """The one answer of a worker; when it hung or was killed by a signal, what stands for it.

    Raises SystemExit when the worker itself is at fault: that is no control that failed.
    """
    options = {"preset": setting.preset, "anchors": setting.anchors, **options}
    with Process(variant, root, setting.deadline, **options) as process:
        answer = process.answer()
    if answer is None:
        if process.code > 0:
            raise SystemExit(f"error: worker '{variant}' ended with {process.code}, see above")
        answer = {"failures": 1, "steps": 1, "errors": [["hang" if process.hung else "died", 1]]}
    note(f"{variant}: {json.dumps(answer)}")
    return answer


def note(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


# -- variants ---------------------------------------------------------------------------------


def naive(setting: Setting, root: Path) -> Answer:
    """Threads that compile as they go."""
    return once(
        "naive",
        root,
        setting,
        devices=setting.controls,
        seq_lens=setting.control_lengths,
        rounds=setting.rounds,
    )


def replay_a(setting: Setting) -> Answer:
    """Cold."""
    with empty_cache() as root:
        return naive(setting, root)


def replay_b(setting: Setting) -> Answer:
    """After the script that "succeeded"."""
    with empty_cache() as root:
        lengths = setting.control_lengths
        once("script", root, setting, devices=setting.controls, seq_lens=lengths)
        return naive(setting, root)


def replay_c(setting: Setting) -> Answer:
    """More lengths than entries, on one device, in one thread."""
    with empty_cache() as root:
        return once(
            "limit",
            root,
            setting,
            anchors=setting.limit_anchors,
            devices=setting.drafters[:1],
            seq_lens=setting.limit_lengths,
        )


@dataclass
class Ours:
    """What both processes of variant d did."""

    cold_bursts: list[Answer] = field(default_factory=list)
    restored_bursts: list[Answer] = field(default_factory=list)
    cold_seconds: float = 0.0
    restored_seconds: float = 0.0
    died: list[str] = field(default_factory=list)

    def total(self, name: str) -> float:
        """Crashes of all bursts of the restored process; of the rest what it said last."""
        values = [burst[name] for burst in self.restored_bursts]
        if name == "crashes":
            return sum(values) + len(self.died)
        return max(values, default=0)

    def rate(self, bursts: list[Answer]) -> float:
        """Tokens a second, median of the bursts."""
        return median([burst["tokens_per_second"] for burst in bursts] or [0.0])

    @property
    def ratio(self) -> float:
        """Restored over cold, median of the pairs."""
        pairs = zip(self.restored_bursts, self.cold_bursts, strict=False)
        ratios = [
            mine["tokens_per_second"] / cold["tokens_per_second"]
            for mine, cold in pairs
            if cold["tokens_per_second"]
        ]
        return median(ratios or [0.0])

    def largest(self, name: str) -> float | None:
        """Of the restored process; None on a CPU."""
        values = [b[name] for b in self.restored_bursts if b[name] is not None]
        return max(values, default=None)


def replay_d(setting: Setting) -> Ours:
    """Cold and restored process side by side, so that both meet the same machine."""
    found = Ours()
    with ExitStack() as stack:
        store, first, second = (stack.enter_context(empty_cache()) for _ in range(3))
        cold = stack.enter_context(start_ours(setting, first, store))
        found.cold_seconds = warmed(cold, "cold", found)
        shutil.rmtree(first)
        restored = stack.enter_context(start_ours(setting, second, store))
        found.restored_seconds = warmed(restored, "restored", found)
        pair = [(cold, "cold", found.cold_bursts), (restored, "restored", found.restored_bursts)]
        for number in range(setting.repeats):
            for process, name, bursts in reversed(pair) if number % 2 else pair:
                burst(process, name, bursts, found)
    return found


def start_ours(setting: Setting, root: Path, store: Path) -> Process:
    """A process that warms from this store."""
    return Process(
        "ours",
        root,
        setting.deadline,
        preset=setting.preset,
        anchors=setting.anchors,
        devices=setting.drafters,
        target_device=setting.target,
        seq_lens=setting.lengths,
        steps=setting.steps,
        root=root,
        store=store,
    )


def warmed(process: Process, name: str, found: Ours) -> float:
    """Seconds that the warm-up took; 0 when there was none."""
    if found.died:
        return 0.0
    answer = process.answer()
    note(f"ours, {name}: {json.dumps(answer)}")
    if answer is None:
        found.died.append("hang" if process.hung else "died")
        return 0.0
    return float(answer["seconds"])


def burst(process: Process, name: str, bursts: list[Answer], found: Ours) -> None:
    """One more burst, unless a process has died."""
    if found.died:
        return
    answer = process.ask()
    note(f"ours, {name}: {json.dumps(answer)}")
    if answer is None:
        found.died.append("hang" if process.hung else "died")
    else:
        bursts.append(answer)


# -- figures ----------------------------------------------------------------------------------


def control_rows(letter: str, answer: Answer) -> list[Row]:
    """Of the naive variants."""
    steps, failures = answer["steps"], answer["failures"]
    name = f"control_{letter}"
    rows = [
        Row(f"{name}_failures", failures, "steps", "all steps", failures / steps),
        Row(f"{name}_fx_failures", answer.get("fx_failures", 0), "steps"),
        Row(f"{name}_concurrent_compiles", answer.get("concurrent", 0), "compiles"),
        Row(f"{name}_tokens_per_second", answer.get("tokens_per_second", 0.0), "tokens/s"),
    ]
    return rows + memory_rows(f"{name}_memory_spread", answer.get("memory_spread"))


def memory_rows(name: str, spread: float | None) -> list[Row]:
    """None on a CPU."""
    return [] if spread is None else [Row(name, spread, "ratio", "least peak", spread)]


def limit_rows(answer: Answer) -> list[Row]:
    """Of variant c."""
    if "slowdown" not in answer:
        return [Row("control_c_failures", 1, "runs")]
    rows = [
        Row("control_c_slowdown", answer["slowdown"], "ratio", "within limit", answer["slowdown"]),
        Row("control_c_within_ms", answer["within_ms"], "ms"),
        Row("control_c_beyond_ms", answer["beyond_ms"], "ms"),
    ]
    if answer["within_gb"] is not None:
        ratio = answer["beyond_gb"] / answer["within_gb"]
        rows.append(Row("control_c_memory", answer["beyond_gb"], "GB", "within limit", ratio))
    return rows


def our_rows(found: Ours) -> list[Row]:
    """Of variant d."""
    cold, restored = found.rate(found.cold_bursts), found.rate(found.restored_bursts)
    warm_ratio = found.restored_seconds / max(found.cold_seconds, 1e-9)
    rows = [
        Row("ours_crashes", found.total("crashes"), "runs"),
        Row("ours_compiles", found.total("compiles"), "compiles"),
        Row("ours_dense_steps", found.total("dense"), "steps"),
        Row("ours_tokens_vs_cold_warm", restored, "tokens/s", "cold warm-up", found.ratio),
        Row("ours_cold_tokens_per_second", cold, "tokens/s"),
        Row("ours_warm_seconds", found.restored_seconds, "s", "cold warm-up", warm_ratio),
    ]
    peak = found.largest("peak_gb")
    rows += memory_rows("ours_memory_spread", found.largest("memory_spread"))
    return rows if peak is None else [*rows, Row("ours_peak_memory", peak, "GB")]


# -- the table --------------------------------------------------------------------------------


def line(title: str, *cells: object) -> str:
    """One variant in 80 columns."""
    crashes, compiles, concurrent, dense, rate, memory = map(str, cells)
    return (
        f"{title[:19]:<19}{crashes:>13}{compiles:>9}{concurrent:>9}{dense:>7}{rate:>10}{memory:>11}"
    )


def shown(results: dict[str, Answer | Ours]) -> str:
    """One line for each variant."""
    lines = [line("variant", "crashes", "compiles", "at once", "dense", "tokens/s", "memory")]
    for letter, result in results.items():
        if isinstance(result, Ours):
            lines += our_lines(result)
        elif letter == "c":
            lines += limit_lines(result)
        else:
            lines.append(control_line(TITLES[letter], result))
    return "\n".join(lines) + "\n"


def control_line(title: str, answer: Answer) -> str:
    """Of a naive variant; the memory is its spread."""
    crashes = f"{answer['failures']} of {answer['steps']}"
    if answer.get("fx_failures"):
        crashes += " FX"
    return line(
        title,
        crashes,
        answer.get("compiles", "-"),
        answer.get("concurrent", "-"),
        answer.get("dense", "-"),
        f"{answer.get('tokens_per_second', 0):,.0f}",
        spread_words(answer),
    )


def spread_words(answer: Answer) -> str:
    """The memory of a round against that of another."""
    spread = answer.get("memory_spread")
    return "-" if spread is None else f"x{spread:.2f}"


def limit_lines(answer: Answer) -> list[str]:
    """Of variant c: milliseconds instead of tokens."""
    if "slowdown" not in answer:
        return [line(TITLES["c"], "1 of 1", "-", "-", "-", "-", "-")]
    lines = []
    for name, dense in (("within", 0), ("beyond", answer["dense"])):
        gb = answer[f"{name}_gb"]
        memory = "-" if gb is None else f"{gb:.1f} GB"
        compiles = answer["compiles"] if name == "within" else 0
        rate = f"{answer[f'{name}_ms']:.1f} ms"
        title = TITLES["c"] if name == "within" else "  past the limit"
        lines.append(line(title, 0, compiles, 0, dense, rate, memory))
    return lines


def our_lines(found: Ours) -> list[str]:
    """Of variant d; both processes."""
    lines = []
    for title, bursts in (
        ("d ours, cold", found.cold_bursts),
        ("d ours, restored", found.restored_bursts),
    ):
        crashes = sum(burst["crashes"] for burst in bursts) + len(found.died)
        steps = sum(burst["steps"] for burst in bursts)
        last = bursts[-1] if bursts else {"compiles": "-", "dense": "-", "memory_spread": None}
        compiles, dense = last["compiles"], last["dense"]
        rate = f"{found.rate(bursts):,.0f}"
        lines.append(
            line(
                title,
                f"{crashes} of {steps}",
                compiles,
                "-" if compiles else 0,
                dense,
                rate,
                spread_words(last),
            )
        )
    return lines


# -- verdict ----------------------------------------------------------------------------------


def faults(results: dict[str, Answer | Ours], setting: Setting) -> list[str]:
    """Controls that did not fail, and failures of ours."""
    found = []
    for letter, result in results.items():
        if isinstance(result, Ours):
            found += our_faults(result)
        elif letter == "c":
            found += limit_faults(result, setting)
        else:
            found += control_faults(letter, result, setting)
    return found


def control_faults(letter: str, answer: Answer, setting: Setting) -> list[str]:
    """On several GPUs only the incident's own error counts."""
    several = setting.on_gpu and len(set(setting.controls)) > 1
    if several and letter == "a" and not answer.get("fx_failures"):
        return [f"the replay proves nothing: no step of control {letter} failed with the FX error"]
    if not (answer["failures"] or answer.get("concurrent")):
        return [f"the replay proves nothing: control {letter} neither failed nor raced"]
    return []


def limit_faults(answer: Answer, setting: Setting) -> list[str]:
    """On a CPU the slowdown is shown, whatever it is."""
    if answer.get("slowdown", 0) >= SLOW:
        return []
    if setting.on_gpu:
        return ["the replay proves nothing: control c is not slower past the limit"]
    note("control c is hardly slower past the limit on this CPU")
    return []


def our_faults(found: Ours) -> list[str]:
    """What should all be 0."""
    named = {name: found.total(name) for name in ("crashes", "compiles", "dense")}
    wrong = [f"ours had {value:g} {name}" for name, value in named.items() if value]
    if not found.restored_bursts:
        wrong.append("ours did not train")
    return wrong


# -- all --------------------------------------------------------------------------------------


def setting_of(options: argparse.Namespace) -> Setting:
    """Fills in what depends on the device."""
    on_gpu = options.device == "cuda"
    count = min(torch.cuda.device_count(), options.gpus) if on_gpu else 0
    if on_gpu and not count:
        raise SystemExit("error: no CUDA GPU on this machine; pass --device cpu")
    names = [f"cuda:{index}" for index in range(count)] or ["cpu"]
    threads = options.threads or max(2, len(names))
    lengths = numbers(options.seq_lens or ("512,1024,1536,2048" if on_gpu else "128,256"))
    stride = 256 if on_gpu else 128
    grown = [stride * (2 + index) for index in range(LENGTHS_PAST_LIMIT)]
    return Setting(
        preset=options.preset,
        anchors=options.anchors or (64 if on_gpu else 2),
        controls=[names[index % len(names)] for index in range(threads)],
        control_lengths=lengths[:2],
        target=names[0],
        drafters=names[1:] or [names[0]] * 2,
        lengths=lengths,
        limit_anchors=256 if on_gpu else 8,
        limit_lengths=grown[:4] + grown[8:] + grown[4:8],
        rounds=3,
        steps=options.steps or (100 if on_gpu else 40),
        repeats=options.repeats or (5 if on_gpu else 15),
        deadline=options.deadline,
    )


def numbers(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(word) for word in text.split(",")]


def figures(results: dict[str, Answer | Ours]) -> list[Row]:
    """All that was measured."""
    rows: list[Row] = []
    for letter, result in results.items():
        if isinstance(result, Ours):
            rows += our_rows(result)
        elif letter == "c":
            rows += limit_rows(result)
        else:
            rows += control_rows(letter, result)
    return rows


def main() -> int:
    """0 when every control failed and ours did not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gpus", type=int, default=64, help="use the first so many [all]")
    parser.add_argument("--threads", type=int, help="replicas of a and b [one a GPU, at least 2]")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--anchors", type=int, help="blocks a row [64; 2 on a CPU]")
    parser.add_argument("--seq-lens", help="of ours; a and b take the first two")
    parser.add_argument("--steps", type=int, help="of each drafter in a burst of ours")
    parser.add_argument("--repeats", type=int, help="pairs of bursts [5; 15 on a CPU]")
    parser.add_argument("--deadline", type=float, default=420.0, help="seconds for each answer")
    parser.add_argument("--only", default="a,b,c,d", help="some variants; writes no result then")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    setting = setting_of(options)
    variants = {"a": replay_a, "b": replay_b, "c": replay_c, "d": replay_d}
    wanted = options.only.split(",")
    results = {letter: run(setting) for letter, run in variants.items() if letter in wanted}
    print(shown(results), file=sys.stderr if options.json else sys.stdout)
    name = "incident_replay" + ("" if options.preset == "tiny" else f"-{options.preset}")
    if len(results) == len(variants):
        report(name, figures(results), as_json=options.json)
    else:
        print(table(figures(results)), end="")
    found = faults(results, setting)
    for fault in found:
        print(fault, file=sys.stderr if options.json else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
