"""What changes a fingerprint, and above all what does not."""

from __future__ import annotations

import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import environment as process_environment
from torch import nn
from workloads import Product, TwoLayer

from compilecache.errors import PlanError
from compilecache.examples import ExampleWorkload
from compilecache.fingerprint import Fingerprint, environment, fingerprint, nearest
from compilecache.sources import classes_digest

CPU = torch.device("cpu")
WORDS = st.text(max_size=20)
COMPONENTS = st.dictionaries(WORDS, WORDS, max_size=5)


@given(COMPONENTS, COMPONENTS)
def test_it_changes_if_and_only_if_a_component_does(
    one: dict[str, str], other: dict[str, str]
) -> None:
    """Equal components are equal digests, in any order; the difference names all that differ."""
    mine, theirs = Fingerprint(one), Fingerprint(other)
    assert (mine.digest == theirs.digest) == (one == other)
    assert mine.digest == Fingerprint(dict(reversed(one.items()))).digest
    difference = mine.diff(theirs)
    assert bool(difference) == (one != other) or "absent" in {*one.values(), *other.values()}
    assert all(pair[0] != pair[1] for pair in difference.values())


@given(COMPONENTS)
def test_text_and_back(components: dict[str, str]) -> None:
    """What a store keeps can be read again."""
    mark = Fingerprint(components)
    assert Fingerprint.parse(mark.dump()) == mark
    assert mark.dump().isascii()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 2, "components": {}}', '{"format": 1, "components": []}', "1"],
)
def test_text_that_is_no_fingerprint(text: str) -> None:
    """Also one of another format."""
    with pytest.raises(PlanError, match="no fingerprint of format 1"):
        Fingerprint.parse(text)


def test_the_difference_names_both_sides() -> None:
    """144859: which component, theirs → ours; the nearest of several is the one to explain."""
    mine = Fingerprint({"torch": "2.13", "gpu": "H200", "driver": "580"})
    close = Fingerprint({"torch": "2.13", "gpu": "H200", "driver": "570"})
    far = Fingerprint({"torch": "2.11", "gpu": "A100", "env.X": "1"})
    assert mine.diff(close) == {"driver": ("570", "580")}
    assert mine.diff(far)["driver"] == ("absent", "580")
    assert mine.diff(far)["env.X"] == ("1", "absent")
    assert nearest(mine, [far, close]) == close
    assert nearest(mine, []) is None


def mark_of(module: nn.Module, **options: object) -> Fingerprint:
    """Of a module with plain examples, in this process."""
    return fingerprint(ExampleWorkload(), module, CPU, options=options)


def changed(one: nn.Module, other: nn.Module) -> set[str]:
    """Components in which two modules differ."""
    return set(mark_of(one).diff(mark_of(other)))


def test_values_of_parameters_do_not_count() -> None:
    """Only names, shapes, dtypes, strides and whether a gradient is wanted."""
    assert changed(nn.Linear(4, 4), nn.Linear(4, 4)) == set()
    assert "workload.parameters" in changed(nn.Linear(4, 4), nn.Linear(4, 5))
    assert "workload.parameters" in changed(nn.Linear(4, 4), nn.Linear(4, 4).double())
    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert changed(nn.Linear(4, 4), frozen) == {"workload.parameters"}


def test_models_of_equal_parameters_are_told_apart() -> None:
    """Another class, another activation, another option of a layer."""
    assert "workload.modules" in changed(nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh()))
    assert changed(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3, padding=1)) == {"workload.modules"}
    assert "workload.modules" in changed(nn.Dropout(0.1), nn.Dropout(0.2))


def test_options_and_settings_count() -> None:
    """Keyword arguments of torch.compile and settings of Inductor."""
    import torch._inductor.config as config

    plain = mark_of(TwoLayer())
    assert set(plain.diff(mark_of(TwoLayer(), mode="max-autotune"))) == {"compile.options"}
    with config.patch(max_autotune=True):
        assert set(plain.diff(mark_of(TwoLayer()))) == {"inductor.max_autotune"}
    assert plain.diff(mark_of(TwoLayer())) == {}


def test_an_adopted_directory_is_kept_under_the_machine_alone() -> None:
    """Versions, CPU and threads; nothing of a workload."""
    names = set(environment(CPU).components)
    assert {
        "torch",
        "torch.git",
        "python",
        "cpu",
        "cpu.flags",
        "cpu.threads",
        "cpu.includes",
    } <= names
    assert not any(name.startswith(("workload", "source", "env", "compile")) for name in names)


SCRIPT = '''
"""A training program that is also a module."""
import sys

import torch
from torch import nn

from compilecache.examples import ExampleWorkload
from compilecache.fingerprint import fingerprint


def helper(x):
    """Doubles."""
    return x * 2  # as it says


class Net(nn.Module):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return helper(self.layer(x))


def show():
    print(fingerprint(ExampleWorkload(), Net(), torch.device("cpu")).dump())


if __name__ == "__main__":
    show()
'''


class Site:
    """Runs the script, or variants of it, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def mark(
        self, script: str = SCRIPT, *, imported: bool = False, **env: str | None
    ) -> Fingerprint:
        """The fingerprint that one process prints."""
        self._count += 1
        folder = self._folder / f"copy{self._count}"
        folder.mkdir()
        (folder / "train.py").write_text(script)
        words = ["-c", "import train; train.show()"] if imported else ["train.py"]
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=process_environment(**env),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Fingerprint.parse(done.stdout)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Where the script lies."""
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def base(site: Site) -> Fingerprint:
    """Of the script as it is."""
    return site.mark()


def test_two_pods_agree(site: Site, base: Fingerprint) -> None:
    """vllm#46235, SkyRL#2167: pod address, host name, bundle index, folder and hash seed change nothing."""
    other = site.mark(
        HOSTNAME="pod-7",
        POD_IP="10.1.2.3",
        RAY_BUNDLE_INDEX="3",
        PYTHONHASHSEED="42",
        TORCHINDUCTOR_CACHE_DIR="/somewhere/else",
        TORCHINDUCTOR_COMPILE_THREADS="7",
    )
    assert base.diff(other) == {}


def test_a_script_and_the_same_file_imported_agree(site: Site, base: Fingerprint) -> None:
    """The trainer runs it, the command line imports it."""
    assert base.diff(site.mark(imported=True)) == {}


def test_words_for_people_do_not_count(site: Site, base: Fingerprint) -> None:
    """Docstrings, comments, blank lines, and what only the script itself does."""
    script = SCRIPT.replace('"""One layer."""', '"""One linear layer."""\n\n    # A comment.')
    script = script.replace('"""Doubles."""', "").replace("  # as it says", "")
    assert base.diff(site.mark(script)) == {}


@pytest.mark.parametrize(
    ("addition", "counts"),
    [
        ("learning_rate = 0.1", False),
        ("def main():\n    helper = 1", False),
        ("if __name__ == '__main__':\n    helper = None", False),
        ("def helper(x):\n    return x", True),
        ("Net.forward = None", True),
        ("from torch.nn.functional import *", True),
        ("try:\n    import fast as helper\nexcept ImportError:\n    pass", True),
    ],
)
def test_of_a_module_only_what_its_classes_reach(
    tmp_path: Path, addition: str, counts: bool
) -> None:
    """A training script changes all the time; that must not cost its cache."""
    digests = []
    for number, script in enumerate((SCRIPT, f"{SCRIPT}\n{addition}\n")):
        path = tmp_path / f"reached{number}.py"
        path.write_text(script)
        module = types.ModuleType("reached")
        module.__file__ = str(path)
        net = type("Net", (), {"__module__": "reached"})
        sys.modules["reached"] = module
        try:
            digests.append(classes_digest([net]))
        finally:
            del sys.modules["reached"]
    assert (digests[0] != digests[1]) == counts


def test_code_counts(site: Site, base: Fingerprint) -> None:
    """Of the class, and of a function that it calls."""
    with ThreadPoolExecutor(2) as pool:
        marks = pool.map(
            site.mark,
            [SCRIPT.replace("x * 2", "x * 3"), SCRIPT.replace("helper(self", "torch.relu(self")],
        )
        for mark in marks:
            assert {name.partition(".")[0] for name in base.diff(mark)} == {"source"}


def test_threads_and_environment_count(site: Site, base: Fingerprint) -> None:
    """OMP_NUM_THREADS on a CPU (it is part of torch's own key), and what torch reads from env."""
    assert set(base.diff(site.mark(OMP_NUM_THREADS="1"))) == {"cpu.threads"}
    changed = set(base.diff(site.mark(TORCHINDUCTOR_MAX_AUTOTUNE="1")))
    assert changed == {"env.TORCHINDUCTOR_MAX_AUTOTUNE"}


def _around_a_compile() -> list[Fingerprint]:
    marks = [mark_of(Product())]
    compiled = torch.compile(Product(), dynamic=False)
    compiled(torch.ones(2, 8)).sum().backward()
    return [*marks, mark_of(Product())]


def test_a_compile_changes_nothing(fresh: object, tmp_path: Path) -> None:
    """torch patches its settings while it compiles and sets them back: that is no change."""
    before, after = fresh.call(  # type: ignore[attr-defined]
        _around_a_compile, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    )
    assert before.diff(after) == {}
