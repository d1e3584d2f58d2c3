"""``python -m dflash_model.train`` from outside: one JSON object, or one clear error."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from processes import ROOT, Ended, Running, Template, environment
from trainees import log_of

from dflash_model.metrics import Step, Summary
from dflash_model.train import main, parser

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven random layers of Qwen3, as the preset ``tiny`` wants them."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    folder = tmp_path_factory.mktemp("target")
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Forty rows, a few of them longer than 64."""
    chance = random.Random(0)
    rows = [[chance.randrange(511) for _ in range(chance.randint(20, 70))] for _ in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


@pytest.fixture
def words(target: Path, data: Path) -> list[str]:
    """Two targets and two drafters on the CPU, nothing compiled."""
    text = f"--target {target} --data {data} --preset tiny --seq-lens 64 --no-warm"
    return f"{text} --target-devices cpu,cpu --drafter-devices cpu,cpu".split()


def begin(fresh: Template, words: list[str], *more: object) -> Running:
    return fresh.start(main, [*words, *map(str, more)])


def run(fresh: Template, words: list[str], *more: object) -> Ended:
    return begin(fresh, words, *more).wait()


def test_command_trains_saves_and_resumes(
    fresh: Template, words: list[str], tmp_path: Path
) -> None:
    """The summary on standard output, progress beside it; the resumed run makes the same steps."""
    common = ("--steps", 8, "--save-every", 4)
    whole = run(fresh, words, *common, "--save", tmp_path / "a", "--log", tmp_path / "a.jsonl")
    assert whole.code == 0, whole.err
    assert whole.json["steps"] == 8 and whole.json["compiles_after_prime"] is None
    assert "rows to train on" in whole.err and "step 8/8  loss " in whole.err
    resume = ("--resume", tmp_path / "a/step-000004", "--log", tmp_path / "b.jsonl")
    resumed = run(fresh, words, *common, *resume)
    assert resumed.code == 0, resumed.err
    assert resumed.json["steps"] == 4
    assert log_of(tmp_path / "b.jsonl") == log_of(tmp_path / "a.jsonl")[4:]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "hello"}', "line 41: has no 'input_ids', only text"),
        ('{"input_ids": [1, 512]}', "line 41: token id 512 is outside the vocabulary of 512"),
    ],
)
def test_unreadable_row_is_one_clear_error(
    fresh: Template, words: list[str], data: Path, line: str, problem: str
) -> None:
    """One line, no traceback, exit code 2, before any model is loaded."""
    with data.open("a") as file:
        file.write(line)
    ended = run(fresh, words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1
    assert problem in ended.err


@pytest.mark.parametrize(
    ("more", "code", "problem"),
    [
        (["--drafter-devices", "cuda:99"], 2, "there is no device 'cuda:99' here"),
        (["--drafter-devices", "gpu"], 2, "there is no device 'gpu'"),
        (["--set", "anchors=0"], 2, "'anchors' is 0, below 1"),
        (["--set", "packed=true"], 2, "packed drafter"),
        (["--seq-lens", "4096"], 2, "'seq_len' is 4096, not within 1 to 1024"),
        (["--preset", "tinny"], 2, "no drafter preset 'tinny'"),
        (["--plan", "none.yaml"], 2, "plan file 'none.yaml' cannot be read"),
        (["--target", "/nowhere"], 1, "target '/nowhere' holds no config.json"),
        (["--resume", "/nowhere"], 1, "'/nowhere' holds no checkpoint"),
        (["--steps", "0"], 2, "0 is below 1"),
        (["--too-long", "error"], 2, "are more than the longest planned, 64"),
    ],
)
def test_option_that_cannot_be_used_is_one_clear_error(
    fresh: Template, words: list[str], more: list[str], code: int, problem: str
) -> None:
    """The exit codes of the other commands, and no traceback."""
    ended = run(fresh, words, *more)
    assert ended.code == code, ended.err
    assert ended.out == "" and problem in ended.err and "Traceback" not in ended.err


def test_failed_thread_is_one_clear_error(
    fresh: Template, words: list[str], data: Path, tmp_path: Path
) -> None:
    """The error that the command prints is the thread's own, with its name."""
    blocked = tmp_path / "blocked"
    blocked.mkdir(mode=0o700)
    ended = run(fresh, words, "--lr", "1e30", "--clip", "1e30", "--steps", 9, "--save", blocked)
    assert ended.code == 1
    last = ended.err.splitlines()[-1]
    assert last.startswith("error: drafter 0: step ") and "Go on from the last checkpoint" in last
    assert "Traceback" not in ended.err and list(blocked.iterdir()) == []


def test_terminated_command_says_how_to_go_on(
    fresh: Template, words: list[str], tmp_path: Path
) -> None:
    """SIGTERM ends it at once with code 143 and leaves a checkpoint that can be resumed."""
    started = begin(fresh, words, "--steps", 5000, "--save-every", 2, "--save", tmp_path / "a")
    while "saving step 4" not in started.err and started.running:
        time.sleep(0.05)
    began = time.monotonic()
    started.kill(signal.SIGTERM)
    ended = started.wait()
    assert time.monotonic() - began < 5
    assert ended.code == 143, ended.err
    assert ended.err.splitlines()[-1].startswith("error: terminated; go on from the last")
    again = begin(fresh, words, "--steps", 5000, "--resume", tmp_path / "a")
    while "going on after step" not in again.err and again.running:
        time.sleep(0.05)
    again.kill()
    assert again.wait().code == -signal.SIGKILL


def test_help_starts_at_once() -> None:
    """Neither torch nor transformers is imported to say which options there are."""
    check = "import sys, dflash_model.train as t; t.parser().format_help(); "
    check += "assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], env=environment(), check=True)


def test_everything_is_documented() -> None:
    """Options, fields of the summary and of the log, and what a resume compares."""
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    options = [option for action in parser()._actions for option in action.option_strings]
    names = [field.name for kind in (Summary, Step) for field in fields(kind)]
    wanted = {f"`{name}`" for name in [*options, *names] if name not in ("-h", "--help")}
    assert sorted(name for name in wanted if name not in text) == []


@pytest.mark.slow
def test_warmed_command_compiles_nothing_in_its_threads(
    fresh: Template, words: list[str], tmp_path: Path
) -> None:
    """From a plan file, drafter and all: two replicas train on what was compiled before."""
    plan = tmp_path / "plan.yaml"
    planned = fresh.command(
        *"plan --workload dflash_model.workload:dflash --seq-lens 64 --phase train".split(),
        *"--set preset=tiny --set attention=dense".split(),
        "--output",
        plan,
    )
    assert planned.code == 0, planned.err
    kept = [word for word in words if word not in ("--preset", "tiny", "--seq-lens", "64")]
    kept.remove("--no-warm")
    places = ("--root", tmp_path / "root", "--store", tmp_path / "store", "--plan", plan)
    ended = run(fresh, kept, *places, "--steps", 8)
    assert ended.code == 0, ended.err
    assert (ended.json["steps"], ended.json["compiles_after_prime"]) == (8, 0)
