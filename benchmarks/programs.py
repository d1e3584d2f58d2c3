"""What programs cost and save against trace: starts, bytes, steps, losses, threads beside a tracer.

Every row is measured in fresh processes; the figure is the median of the ratios of pairs.
devices  cold warm-ups by programs of 1, 2, 4 devices, and restored ones of all of them
prime    one device: restored programs against the complete directory that trace left, and bytes
step     steady training steps and AdamW, against what torch.compile compiled cold in that process
threads  the tiny drafter trains in threads while another one traces and compiles without pause
The result is written as soon as a figure is known, and parts of one setting go together, whatever
the commit (a row of another one names it);
with --folder what was compiled cold serves a later call, too.
Usage: programs.py [--preset tiny|qwen3-4b] [--devices cpu|cuda:0,cuda:1] [--seq-lens 256,384]
[--parts cold,step,threads] [--rounds 3] [--folder /tmp/programs] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from results import Row, commit, path_of, table, write

from compilecache.cachedir import CacheDir

HERE = Path(__file__).parent
CALLS = 10_000
"""That no error should come in."""
CPU_CALLS = 2_000
"""Where ten thousand take minutes."""

Answer = dict[str, Any]


def note(text: str) -> None:
    """Progress."""
    print(f"{time.perf_counter() - BEGAN:5.0f} s  {text}", file=sys.stderr, flush=True)


BEGAN = time.perf_counter()


@dataclass(frozen=True)
class Setting:
    """What everything is measured with."""

    preset: str
    anchors: int | None
    """Blocks a row; None for the preset's own."""
    devices: list[str]
    lengths: list[int]
    rounds: int
    repeats: int
    calls: int
    cold_trace: bool

    def facts(self) -> dict[str, object]:
        """What figures of one result share."""
        names = ("preset", "anchors", "devices", "lengths")
        return {name: getattr(self, name) for name in names}


# -- figures ----------------------------------------------------------------------------------


class Sheet:
    """The figures so far, on disk at every moment."""

    def __init__(self, setting: Setting, bench: str = "programs") -> None:
        self._bench = bench + ("" if setting.preset == "tiny" else f"-{setting.preset}")
        self._setting = setting.facts()
        self._commit = commit()  # whatever is committed while it runs
        self.rows: dict[str, Row] = {}
        self._left_out: dict[str, str] = {}
        self._remarks: dict[str, list[str]] = {}
        self.failed = False
        self.path = path_of(self._bench)
        before = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}
        if before.get("setting") == self._setting:
            self._keep(before)

    def _keep(self, before: Mapping[str, Any]) -> None:
        """What an earlier run has found, until it is measured anew; rows of another commit name it."""
        earlier = before["commit"] if before["commit"] != self._commit else None
        for kept in before["rows"]:
            row = Row(**kept)
            self.rows[row.figure] = replace(row, commit=row.commit or earlier)
        self._left_out = before["left_out"]
        self._remarks = before["remarks"]

    def judge(
        self,
        figure: str,
        mine: Sequence[float],
        others: Sequence[float],
        against: str,
        target: str,
    ) -> None:
        """A figure with a target: pairs of seconds that programs and the other took."""
        faster = target.startswith(">=")
        pairs = zip(mine, others, strict=True)
        ratio = median((b / a if faster else a / b) for a, b in pairs)
        row = Row(figure, median(mine), "s", against, ratio, median(others), target)
        self.add(row)

    def add(self, row: Row) -> None:
        """One figure; unless it was judged already, it passes when its ratio is as the target says."""
        if row.target is not None and row.ratio is not None and row.passed is None:
            word, limit = row.target.split()
            good = row.ratio >= float(limit) if word == ">=" else row.ratio <= float(limit)
            row = replace(row, passed=good)
        self.rows[row.figure] = row
        self._left_out.pop(row.figure, None)
        note(f"{row.figure} {row.value:.4g} {row.unit}, ratio {row.ratio or 0:.4g}")
        self._write()

    def leave_out(self, figure: str, reason: str) -> None:
        """A figure that cannot be had, and why."""
        self.rows.pop(figure, None)
        self._left_out[figure] = reason
        note(f"{figure} left out: {reason}")
        self._write()

    def remark(self, what: str, texts: Sequence[str]) -> None:
        """What a process did that it should not have, in words."""
        self._remarks.pop(what, None)
        if texts:
            self._remarks[what] = list(dict.fromkeys(texts))
            note(f"{what}: {'; '.join(self._remarks[what])}")
            self._write()

    def _write(self) -> None:
        if not self.rows:
            return  # what another setting has found stays until there is something instead
        write(
            self._bench,
            list(self.rows.values()),
            commit=self._commit,
            setting=self._setting,
            left_out=self._left_out,
            remarks=self._remarks,
        )


# -- processes --------------------------------------------------------------------------------


class Bench:
    """Fresh processes over one folder; what was compiled cold is compiled once."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting = setting
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)

    def plan(self, lengths: Sequence[int], *, preset: str, anchors: int | None) -> Path:
        """A plan file of both phases."""
        path = self.folder / f"{preset}-{'-'.join(map(str, lengths))}.yaml"
        words = ["plan", "--workload", "dflash_model.workload:dflash", "--set", f"preset={preset}"]
        words += ["--set", f"anchors={anchors}"] if anchors else []
        words += ["--seq-lens", ",".join(map(str, lengths)), "--output", str(path), "--json"]
        command = [sys.executable, "-m", "compilecache", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=self._environment(path))
        return path

    def own_plan(self, lengths: Sequence[int] | None = None) -> Path:
        """Of the setting."""
        setting = self.setting
        return self.plan(lengths or setting.lengths, preset=setting.preset, anchors=setting.anchors)

    def run(self, script: str, how: str, root: Path, devices: list[str], *words: object) -> Answer:
        """One process on a cache root. Raises CalledProcessError after showing how it ended."""
        root.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, str(HERE / script), how, "--root", str(root)]
        command += ["--devices", ",".join(devices), *map(str, words)]
        log = self.folder / "log"
        with log.open("w", encoding="utf-8") as out:
            ended = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=out, text=True, env=self._environment(root)
            )
        if ended.returncode:
            print(log.read_text(encoding="utf-8")[-4000:], file=sys.stderr)
        ended.check_returncode()
        answer: Answer = json.loads(ended.stdout.splitlines()[-1])
        return answer

    def warm(
        self, engine: str, devices: list[str], root: Path, store: Path | str, *words: str
    ) -> Answer:
        """One ensure_warm of the setting's plan."""
        options = ("--plan", self.own_plan(), "--engine", engine, "--store", store, *words)
        result = self.run("worker.py", "ours", root, devices, *options)
        kinds = [row["status"] for row in result["report"]["targets"]]
        words_of_kinds = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        note(f"{engine} on {','.join(devices)}: {result['seconds']:.1f} s ({words_of_kinds})")
        return result

    def cold(self, engine: str, count: int) -> Answer:
        """Of the first so many devices, with a store and a root of its own; an earlier one if kept."""
        root, store = self.root(engine, count), self.store(engine, count)
        kept = self.folder / f"{engine}-{count}.json"
        if not kept.is_file():
            shutil.rmtree(root, ignore_errors=True)
            shutil.rmtree(store, ignore_errors=True)
            result = self.warm(engine, self.setting.devices[:count], root, store)
            kept.write_text(json.dumps(result), encoding="utf-8")
        answer: Answer = json.loads(kept.read_text(encoding="utf-8"))
        return answer

    def restored(self, count: int, *words: str, engine: str = "program") -> Answer:
        """What the first so many devices compiled cold, from its store in an empty root."""
        devices = self.setting.devices[:count]
        with self.empty_root() as root:
            return self.warm(engine, devices, root, self.store(engine, count), *words)

    @contextmanager
    def empty_root(self, name: str = "restored") -> Iterator[Path]:
        """For one process; what a call that was cut short has left there goes first."""
        root = self.folder / name
        used = (root, root.with_name(f"{name}-cold"))
        for path in used:
            shutil.rmtree(path, ignore_errors=True)
        try:
            yield root
        finally:
            for path in used:
                shutil.rmtree(path, ignore_errors=True)

    def traced(self) -> Answer:
        """By trace, on a copy of the whole directory that its cold run left."""
        with self.empty_root() as root:
            shutil.copytree(self.root("trace", 1), root, symlinks=True)
            return self.warm("trace", self.setting.devices[:1], root, "", "--ahead")

    def root(self, engine: str, count: int) -> Path:
        """Of a cold run."""
        return self.folder / f"{engine}-{count}-root"

    def store(self, engine: str, count: int) -> Path:
        """Of a cold run."""
        return self.folder / f"{engine}-{count}-store"

    def _environment(self, root: Path) -> dict[str, str]:
        cache = root.with_name(f"{root.name}-cold") if root.name == "step" else root
        return {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
            # Where nothing may be kept of imports, every process would compile torch's sources anew.
            "PYTHONDONTWRITEBYTECODE": "",
        }


def oddities(result: Answer, *wanted: str) -> list[str]:
    """Targets that did not end as they should have, and what was given up."""
    targets = result["report"]["targets"]
    odd = [
        f"{r['target']}: {r['status']} by {r['engine']}"
        for r in targets
        if r["status"] not in wanted
    ]
    notes = [f"{row['target']}: {text}" for row in targets for text in row["notes"]]
    return [*odd, *notes, *result["report"]["gave_up"], *result.get("said", ())]


# -- starts -----------------------------------------------------------------------------------


def devices(bench: Bench, sheet: Sheet) -> None:
    """Cold on more and more devices, then restored on all."""
    total, rounds = len(bench.setting.devices), bench.setting.rounds
    cold = {n: bench.cold("program", n) for n in sorted({1, 2, 4, total}) if n <= total}
    for count, result in cold.items():
        sheet.remark(f"cold, devices: {count}", oddities(result, "compiled", "rewritten"))
    for count, target in ((2, "<= 1.2"), (4, "<= 1.6")):
        figure = f"devices_{count}_vs_1"
        if count not in cold:
            sheet.leave_out(figure, f"the run has {total} device(s): {bench.setting.devices}")
            continue
        sheet.judge(figure, [cold[count]["seconds"]], [cold[1]["seconds"]], "1 device", target)
    restored = []
    for _ in range(rounds):
        restored.append(bench.restored(total)["seconds"])
        others = [cold[total]["seconds"]] * len(restored)
        sheet.judge("ensure_warm_vs_cold", restored, others, "cold", ">= 20")
    if total == 1 or bench.setting.cold_trace:
        others = [bench.cold("trace", total)["seconds"]] * rounds
        sheet.judge("ensure_warm_vs_cold_trace", restored, others, "cold trace", ">= 20")
    else:
        sheet.leave_out("ensure_warm_vs_cold_trace", "not asked for (--cold-trace)")


def prime(bench: Bench, sheet: Sheet) -> None:
    """One device: a restored root of programs against a copy of trace's own."""
    bench.cold("program", 1)
    bench.cold("trace", 1)
    mine: list[Answer] = []
    others: list[Answer] = []
    for number in range(bench.setting.rounds):
        both = [(mine, lambda: bench.restored(1, "--ahead")), (others, bench.traced)]
        for kept, start in reversed(both) if number % 2 else both:
            kept.append(start())
        for figure, target, cost in (
            ("program_vs_trace_further_shape", ">= 4", further_shape),
            ("program_vs_trace_first_shape", ">= 1.5", first_shape),
        ):
            sheet.judge(figure, [*map(cost, mine)], [*map(cost, others)], "trace, warm", target)
    sheet.remark("restored", [text for result in mine for text in oddities(result, "restored")])
    sheet.remark("traced", [text for result in others for text in oddities(result, "local")])
    weigh(bench, sheet, mine[0]["report"])


def weigh(bench: Bench, sheet: Sheet, restored: Answer) -> None:
    """What programs bring for a shape against what trace leaves."""
    files, size = weight(bench.root("trace", 1))
    shapes = len(bench.setting.lengths)
    for figure, unit, mine, other, target in (
        ("bytes_vs_trace_directory", "bytes", restored["restored_bytes"], size, "<= 0.6"),
        ("files_vs_trace_directory", "files", restored["restored_files"], files, None),
    ):
        values = (mine / shapes, unit, "directory", mine / other, other / shapes)
        sheet.add(Row(figure, *values, target))


def weight(root: Path) -> tuple[int, int]:
    """Files and bytes of a cache directory."""
    files = CacheDir(root).files()
    return len(files), sum((root / path).stat().st_size for path in files)


def by_length(result: Answer) -> list[float]:
    """Seconds of all functions and phases of one length, first and second run; in the plan's order."""
    seconds: dict[str, float] = {}
    for row in result["report"]["targets"]:
        length = next(word for word in row["target"].split() if word.startswith("seq_len="))
        seen = row["evidence"]
        seconds[length] = seconds.get(length, 0) + seen["seconds"] + seen["again_seconds"]
    return list(seconds.values())


def first_shape(result: Answer) -> float:
    """Seconds of the first length."""
    return by_length(result)[0]


def further_shape(result: Answer) -> float:
    """Seconds of each length after it."""
    return median(by_length(result)[1:])


# -- steps and threads ------------------------------------------------------------------------


def step(bench: Bench, sheet: Sheet) -> None:
    """On the device that programs were compiled on, and on one that they were rewritten for."""
    setting = bench.setting
    plan = bench.own_plan(sorted({setting.lengths[0], setting.lengths[-1]}))
    found = [bench.store("program", n) for n in range(len(setting.devices), 0, -1)]
    store = next((path for path in found if path.is_dir()), bench.folder / "step-store")
    differences: list[tuple[float, float, float]] = []
    noise: list[tuple[float, float, float]] = []
    for place, figure in enumerate(("step_program_vs_cold", "step_rewritten_vs_cold")):
        if place >= len(setting.devices):
            sheet.leave_out(figure, f"the run has {len(setting.devices)} device(s)")
            continue
        answer = stepped(bench, setting.devices[place], plan, store)
        rows = answer["targets"]
        if place and not all(row["origin"] for row in rows):
            reasons = [text for row in rows for text in row["notes"]]
            sheet.leave_out(figure, f"nothing was rewritten: {reasons}")
        else:
            worst = max(answer["lengths"].values(), key=lambda seen: float(seen["ratio"]))
            against = (worst["ratio"], worst["cold_ms"], "<= 1.01")
            sheet.add(Row(figure, worst["program_ms"], "ms", "compiled cold", *against))
        program, cold, again = (answer["losses"][name] for name in ("program", "cold", "again"))
        differences.append((apart(program, cold), program[-1], cold[-1]))
        noise.append((apart(again, cold), again[-1], cold[-1]))
        ratio, last, other = max(differences)
        sheet.add(Row("loss_max_rel_diff", last, "loss", "compiled cold", ratio, other, "<= 0.001"))
        ratio, last, other = max(noise)
        sheet.add(Row("loss_cold_vs_itself", last, "loss", "compiled cold", ratio, other))


def stepped(bench: Bench, device: str, plan: Path, store: Path) -> Answer:
    """A process that compares steps on one device; says how long each length takes."""
    words = ("--plan", plan, "--store", store, "--repeats", bench.setting.repeats)
    with bench.empty_root("step") as root:
        answer = bench.run("programs_worker.py", "step", root, [device], *words)
    for length, seen in answer["lengths"].items():
        note(
            f"step on {device}, {length}: program {seen['program_ms']:.2f} ms, "
            f"cold {seen['cold_ms']:.2f} ms, ratio {seen['ratio']:.4f}"
        )
    return answer


def apart(program: Sequence[float], cold: Sequence[float]) -> float:
    """Largest relative difference of two loss curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(program, cold, strict=True))


def threads(bench: Bench, sheet: Sheet) -> None:
    """Of the tiny drafter, small enough that ten thousand calls are soon made."""
    on_gpu = bench.setting.devices[0] != "cpu"
    plan = bench.plan([256 if on_gpu else 128], preset="tiny", anchors=8 if on_gpu else 2)
    store = bench.folder / "threads-store"
    words = ("--plan", plan, "--store", store, "--calls", bench.setting.calls)
    with bench.empty_root("threads") as root:
        answer = bench.run("programs_worker.py", "threads", root, bench.setting.devices, *words)
    calls, errors, entries = answer["calls"], answer["errors"], answer["entries"]
    note(f"{calls} calls in {answer['seconds']:.0f} s, {answer['traces']} FX traces, "
         f"{answer['compiles']} compilations")  # fmt: skip
    sheet.remark("threads", [f"{count} times {text}" for text, count in answer["kinds"]])
    sheet.remark("the tracer", [f"{count} times {text}" for text, count in answer["storm_failed"]])
    past = [f"calls went past the programs: torch compiled {entries} entries"] if entries else []
    sheet.remark("entries", past)
    few = [f"{calls} of {CALLS} calls: no proof"] if calls < CALLS else []
    sheet.remark("calls", few)
    row = Row("errors_under_tracing", errors, "errors", "calls", errors / calls, calls, "<= 0")
    sheet.add(replace(row, passed=not errors and not entries and not few))
    sheet.add(Row("traces_meanwhile", answer["traces"], "traces"))
    sheet.add(Row("compilations_meanwhile", answer["compiles"], "compiles"))


# -- all --------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Bench, Sheet], None]] = {
    "devices": devices,
    "prime": prime,
    "step": step,
    "threads": threads,
}
GROUPS = {"cold": ("devices", "prime")}


def setting_of(options: argparse.Namespace) -> Setting:
    """Fills in what depends on preset and device."""
    tiny = options.preset == "tiny"
    lengths = options.seq_lens or ("256,384" if tiny else "512,1024,1536,2048")
    return Setting(
        preset=options.preset,
        anchors=options.anchors or (None if tiny else 64),
        devices=options.devices.split(","),
        lengths=[int(word) for word in lengths.split(",")],
        rounds=options.rounds,
        repeats=options.repeats,
        calls=options.calls or (CPU_CALLS if options.devices == "cpu" else CALLS),
        cold_trace=options.cold_trace,
    )


def name_of(setting: Setting) -> str:
    """A folder that serves no other setting and no other commit."""
    return re.sub(r"[^\w]+", "-", f"{commit()} {' '.join(map(str, setting.facts().values()))}")


B = TypeVar("B", bound=Bench)


def run_parts(
    parts: Mapping[str, Callable[[B, Sheet], None]],
    wanted: Sequence[str],
    bench: B,
    sheet: Sheet,
    *,
    as_json: bool,
) -> int:
    """Measures these parts and prints the figures; 1 when a part could not be measured, else 0."""
    for name in wanted:
        note(f"-- {name}")
        try:
            parts[name](bench, sheet)
            sheet.remark(f"part {name}", [])
        except (subprocess.CalledProcessError, ValueError) as error:
            sheet.failed = True
            sheet.remark(f"part {name}", [f"{type(error).__name__}: {error}"[:500]])
    text = sheet.path.read_text(encoding="utf-8") if sheet.path.is_file() else "{}\n"
    print(text if as_json else table(list(sheet.rows.values())), end="")
    return 1 if sheet.failed else 0


def main() -> int:
    """0 when every part could be measured, whatever the figures say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--devices", "--device", default="cpu")
    parser.add_argument("--seq-lens", help="two or more [256,384; 512 to 2048 if not tiny]")
    parser.add_argument("--anchors", type=int, help="blocks a row [64; the preset's own if tiny]")
    parser.add_argument("--parts", "--only", default="cold,step,threads")
    parser.add_argument("--rounds", type=int, default=3, help="of restored starts and pairs")
    parser.add_argument("--repeats", type=int, default=30, help="rounds ABBA of steps")
    parser.add_argument("--calls", type=int, help=f"in threads [{CALLS}; {CPU_CALLS} on a CPU]")
    parser.add_argument("--cold-trace", action="store_true", help="trace cold on all devices, too")
    parser.add_argument("--folder", type=Path, help="keep there what was compiled cold")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    setting = setting_of(options)
    sheet = Sheet(setting)
    wanted = [part for word in options.parts.split(",") for part in GROUPS.get(word, (word,))]
    if unknown := sorted({*wanted} - PARTS.keys()):
        parser.error(f"there is no part {', '.join(unknown)}, only {', '.join([*GROUPS, *PARTS])}")
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(setting, folder / name_of(setting))
        return run_parts(PARTS, wanted, bench, sheet, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
