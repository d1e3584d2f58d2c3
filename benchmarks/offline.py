"""Compiled in a process that sees no GPU, then used on real ones: against a native compile.

compile  the plan by ``compilecache warm --gpu-profile`` without a GPU, and natively on the first one;
         both at once where there are cores for it, and the row says so
first    a fresh process with all devices: compiler launches, canaries against eager, what is settled
pair     per device a fresh process that loads both: kernels, losses, gradients, steps in turn
baked    published offline into a folder for an image, pulled from it into an empty root, used by the trainer in
         threads on all devices, sealed
Every row is written as soon as it is known. Parts of one commit and setting go together; --folder keeps
what was compiled for a later call.
Usage: offline.py [--preset tiny|qwen3-4b] [--devices cuda:0,cuda:1] [--seq-lens 512,1024,1536]
[--parts compile,first,pair,baked] [--at-once | --no-at-once] [--folder DIR] [--json]
On a machine without a GPU the part compile alone runs, and reports its time and memory; baked, where it is asked
for, ends with the pull.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from programs import Bench, Setting, Sheet, name_of, note, run_parts
from results import Row

HERE = Path(__file__).parent
NO_GPU = torch.cuda.device_count() == 0
ENOUGH_CORES = 16
"""For two compiles that hardly slow each other."""
PROFILE = "h200"
"""Where none can be recorded."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """A command that has ended."""

    text: str
    """Its standard output."""
    seconds: float
    largest: int
    """MB of its largest process."""


class Offline(Bench):
    """Fresh processes over one folder."""

    def __init__(self, setting: Setting, folder: Path, *, at_once: bool = False) -> None:
        super().__init__(setting, folder)
        self.at_once = at_once
        self.offline_store = folder / "offline-store"
        self.native_store = folder / "native-store"

    def profile(self) -> str:
        """Recorded on this machine's first GPU, else the one that is shipped."""
        if NO_GPU:
            return PROFILE
        path = self.folder / "profile.json"
        device = self.setting.devices[0]
        self.command("gpu-profile", "--device", device, "--output", str(path))
        shipped = json.loads((HERE.parent / "compilecache/gpus/h200.json").read_text())
        mine = json.loads(path.read_text(encoding="utf-8"))
        other = {k: (v, shipped.get(k)) for k, v in mine.items() if v != shipped.get(k)}
        note(f"profile {mine['name']}, unlike the shipped one: {other}")
        return str(path)

    def command(self, *words: str, package: str = "compilecache", script: str = "") -> Said:
        """Runs one command, or a script, to its end."""
        environment = {**self._environment(self.folder / "command")}
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            environment.pop(name)
        what = [str(HERE / script)] if script else ["-m", package]
        command = [sys.executable, *what, *words]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            assert child.stdout is not None
            text = child.stdout.read()
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, command)
        return Said(text, time.perf_counter() - began, used.ru_maxrss // 1024)

    def worker(self, how: str, *words: object) -> Answer:
        """The last line of a worker; the rest of what it says comes as it goes."""
        command = [sys.executable, str(HERE / "offline_worker.py"), how, *map(str, words)]
        environment = self._environment(self.folder / how)
        environment.pop("TRITON_CACHE_DIR")
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env=environment, check=True
        )
        answer: Answer = json.loads(ended.stdout.splitlines()[-1])
        return answer


# -- parts ------------------------------------------------------------------------------------


def compile_both(bench: Offline, sheet: Sheet) -> None:
    """Without a GPU, and on one; at once where neither takes cores from the other."""
    plan, profile = str(bench.own_plan()), bench.profile()
    words = ("warm", plan, "--engine", "program", "--json", "--store")
    offline = (*words, str(bench.offline_store), "--root", str(bench.folder / "offline-root"),
               "--gpu-profile", profile)  # fmt: skip
    native = (*words, str(bench.native_store), "--root", str(bench.folder / "native-root"),
              "--device", bench.setting.devices[0])  # fmt: skip
    with ThreadPoolExecutor(2 if bench.at_once else 1) as pool:
        running = [pool.submit(bench.command, *each) for each in (offline, native)[: 2 - NO_GPU]]
    mine, *others = (each.result() for each in running)
    rows = json.loads(mine.text)["targets"]
    note(f"offline: {mine.seconds:.1f} s, {len(rows)} targets, largest process {mine.largest} MB")
    sheet.remark("offline", [f"{r['target']}: {r['status']} {r['notes']}" for r in odd(rows)])
    if not others:
        sheet.add(Row("offline_compile_memory", mine.largest, "MB"))
        sheet.add(Row("offline_compile_seconds", mine.seconds, "s"))
        sheet.leave_out("offline_compile_vs_native", "this machine has no GPU")
        return
    (other,) = others
    alone = [sum(r["evidence"]["seconds"] for r in rows), sum(
        r["evidence"]["seconds"] for r in json.loads(other.text)["targets"])]  # fmt: skip
    note(
        f"native: {other.seconds:.1f} s; of targets alone {alone[0]:.1f} s, {alone[1]:.1f} s native"
    )
    against = "native, both at once" if bench.at_once else "native"
    ratio = mine.seconds / other.seconds
    sheet.add(Row("offline_compile_vs_native", mine.seconds, "s", against, ratio, other.seconds))
    ratio = mine.largest / other.largest
    sheet.add(Row("offline_compile_memory", mine.largest, "MB", against, ratio, other.largest))


def odd(rows: list[Answer]) -> list[Answer]:
    """Targets with something to tell."""
    return [row for row in rows if row["status"] != "compiled" or row["notes"]]


def first(bench: Offline, sheet: Sheet) -> None:
    """All devices, an empty root, the store that was filled offline."""
    devices = ",".join(bench.setting.devices)
    answer = bench.worker(
        "first", "--plan", bench.own_plan(), "--devices", devices,
        "--store", bench.offline_store, "--root", bench.folder / "first-root",
    )  # fmt: skip
    rows = answer["report"]["targets"]
    launches = sum(row["evidence"]["launches"] for row in rows if row["evidence"])
    wrong = [row for row in rows if row["status"] not in ("restored", "rewritten")]
    sheet.remark("first contact", [f"{r['target']}: {r['status']} {r['notes']} {r['error']}" for r in wrong]
                 + answer["report"]["gave_up"])  # fmt: skip
    note(f"first contact: {answer['seconds']:.1f} s, {answer['timed']} kernels timed")
    row = Row("offline_compiler_launches", launches, "launches", "targets", launches / len(rows),
              len(rows), "<= 0", passed=launches == 0 and not wrong)  # fmt: skip
    sheet.add(row)
    sheet.add(Row("offline_first_contact_seconds", answer["seconds"], "s"))


def pair(bench: Offline, sheet: Sheet) -> None:
    """Both kinds of programs of the same weights, on each device."""
    losses: list[float] = []
    gradients: list[float] = []
    steps: list[tuple[float, float, float]] = []
    missing = unsettled = 0
    for device in bench.setting.devices:
        answer = bench.worker(
            "pair", "--plan", bench.own_plan(), "--devices", device,
            "--store", bench.offline_store, "--native", bench.native_store,
            "--root", bench.folder / f"pair-{device.replace(':', '')}",
            "--repeats", bench.setting.repeats,
        )  # fmt: skip
        for name, seen in answer["specs"].items():
            note(f"{device}, {name}: {seen}")
            losses.append(seen["loss"])
            missing += seen["missing"]
            unsettled += seen["unsettled"]
            if "gradients" in seen:
                gradients.append(seen["gradients"])
                steps.append((seen["ratio"], seen["offline_ms"], seen["native_ms"]))
        sheet.remark(f"second start on {device}", answer["odd"])
    against = "native"
    sheet.add(
        Row("offline_loss_rel_diff", max(losses), "ratio", against, max(losses), None, "<= 1e-4")
    )
    limit = "<= 1e-2" if bench.setting.preset != "tiny" else "<= 1e-4"
    worst = max(gradients)
    sheet.add(Row("offline_gradient_rel_diff", worst, "ratio", against, worst, None, limit))
    ratio, mine, other = max(steps)
    sheet.add(Row("offline_step_vs_native", mine, "ms", against, ratio, other, "<= 1.02"))
    sheet.add(Row("offline_kernels_unsettled", unsettled, "kernels"))
    sheet.add(Row("offline_kernels_missing", missing, "kernels", against, missing, None, "<= 0"))


STEPS = 15
"""Of the trainer."""


def baked(bench: Offline, sheet: Sheet) -> None:
    """What the part compile left is baked; without it, it is compiled here."""
    folder, devices = bench.folder / "baked", ",".join(bench.setting.devices)
    image, root = folder / "image", folder / "root"
    cleared(folder)
    plan = folder / "plan.yaml"
    known = bench.own_plan().read_text(encoding="utf-8")
    plan.write_text(f"engine: program\n{known}", encoding="utf-8")
    recorded = bench.folder / "profile.json"
    laid = bench.command(
        "run", str(plan), "--gpu-profile", str(recorded) if recorded.is_file() else bench.profile(),
        "--store", "none", "--root", str(bench.folder / "offline-root"), "--bake", str(image),
        package="warmup",
    )  # fmt: skip
    line = json.loads(laid.text)
    note(f"baked {line['baked']} targets: {laid.seconds:.1f} s, {line['compiled']} compiled")
    brought = bench.command(
        "pull", str(plan), "--baked", str(image), "--store", "none", "--root", str(root),
        "--device", devices, "--fingerprint", line["fingerprint"], package="warmup",
    )  # fmt: skip
    note(f"pulled {json.loads(brought.text)['restored']} targets: {brought.seconds:.1f} s")
    if NO_GPU:
        sheet.leave_out("offline_baked_compiles", "this machine has no GPU")
        sheet.leave_out("offline_baked_steps", "this machine has no GPU")
        return
    ended = bench.command(
        "--plan", str(plan), "--devices", devices, "--root", str(root), "--steps", str(STEPS),
        script="offline_trainer.py",
    )  # fmt: skip
    trained(json.loads(ended.text.splitlines()[-1]), sheet)


def trained(answer: Answer, sheet: Sheet) -> None:
    """What the trainer has seen."""
    rows, steps = answer["report"]["targets"], answer["summary"]["steps"]
    wrong = [row for row in rows if row["status"] not in ("local", "rewritten")]
    sheet.remark("trained from the image", [f"{r['target']}: {r['status']} {r['notes']} {r['error']}" for r in wrong]
                 + answer["report"]["gave_up"] + answer["launched"])  # fmt: skip
    note(f"trained {steps} steps, loss {answer['summary']['last_loss']:.4g}, warm after "
         f"{answer['seconds']:.1f} s, {answer['refused']} calls refused")  # fmt: skip
    compiles = answer["summary"]["compiles_after_prime"] + len(answer["launched"])
    sheet.add(Row("offline_baked_compiles", compiles, "compiles", "targets", compiles / len(rows), len(rows),
                  "<= 0", passed=compiles == 0 and not wrong and not answer["refused"]))  # fmt: skip
    sheet.add(Row("offline_baked_steps", steps, "steps"))


def cleared(folder: Path) -> None:
    """Empty, also where a baked cache lies in it, which nobody may write."""
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


PARTS: dict[str, Callable[[Offline, Sheet], None]] = {
    "compile": compile_both,
    "first": first,
    "pair": pair,
    "baked": baked,
}


def setting_of(options: argparse.Namespace) -> Setting:
    """Fills in what depends on the preset."""
    tiny = options.preset == "tiny"
    lengths = options.seq_lens or ("256" if tiny else "512,1024,1536")
    return Setting(
        preset=options.preset,
        anchors=options.anchors or (None if tiny else 64),
        devices=options.devices.split(","),
        lengths=[int(word) for word in lengths.split(",")],
        rounds=1,
        repeats=options.repeats,
        calls=0,
        cold_trace=False,
    )


def main() -> int:
    """0 when every part could be measured, whatever the figures say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--devices", "--device", default="cuda:0")
    parser.add_argument("--seq-lens", help="[256; 512,1024,1536 if not tiny]")
    parser.add_argument("--anchors", type=int, help="blocks a row [64; the preset's own if tiny]")
    parser.add_argument("--parts", default="compile" if NO_GPU else "compile,first,pair,baked")
    parser.add_argument("--repeats", type=int, default=20, help="rounds ABBA of steps")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--at-once",
        action=argparse.BooleanOptionalAction,
        help=f"compile offline and natively at the same time [with {ENOUGH_CORES} cores or more]",
    )
    parser.add_argument("--folder", type=Path, help="keep there what was compiled")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    setting = setting_of(options)
    sheet = Sheet(setting, "offline")
    wanted = options.parts.split(",")
    if unknown := sorted({*wanted} - PARTS.keys()):
        parser.error(f"there is no part {', '.join(unknown)}, only {', '.join(PARTS)}")
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        at_once = cores >= ENOUGH_CORES if options.at_once is None else options.at_once
        bench = Offline(setting, folder / name_of(setting), at_once=at_once)
        return run_parts(PARTS, wanted, bench, sheet, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
