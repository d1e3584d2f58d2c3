"""What is seen of a process: which compilers it starts, which files of the root it touches."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from compilecache.watch import is_compile, watching


@pytest.mark.parametrize(
    "command",
    [
        "g++ main.cpp -o main.so",
        "/usr/bin/g++-12 -shared main.cpp",
        "x86_64-linux-gnu-gcc -c a.c",
        "clang++ a.cpp",
        "/usr/local/cuda/bin/ptxas -v --gpu-name sm_90a a.ptx -o a.cubin",
        "ptxas --gpu-name sm_90a a.ptx",
        "nvcc a.cu",
        "cc a.c",
        "/usr/bin/c++ a.cc",
        "ld -o a.so a.o",
        "gcc -v a.c -o a",
    ],
)
def test_what_produces_code(command: str) -> None:
    """Compilers and linkers under the names that distributions give them; verbose ones too."""
    assert is_compile(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "g++ --version",
        "gcc -dumpversion",
        "g++ -E -P - -v",
        "ld --version",
        "clang -V",
        "gcc -v",
        "python -c pass",
        "ldconfig -p",
        "/sbin/ldconfig -p",
        "cuobjdump a.cubin",
        "lscpu",
        "accelerate launch",
        "",
    ],
)
def test_what_does_not(command: str) -> None:
    """Questions to a compiler, and programs of similar names."""
    assert not is_compile(command.split())


def test_launches_and_files_are_seen_from_every_thread(tmp_path: Path) -> None:
    """Only below the root, only inside the block; a compiler that fails to start counts too."""
    inside, outside = tmp_path / "root" / "ab" / "file", tmp_path / "rooted"
    inside.parent.mkdir(parents=True)
    inside.write_text("x")
    outside.write_text("x")

    def work() -> None:
        inside.read_text()
        outside.read_text()
        subprocess.run([sys.executable, "-c", ""], check=True)
        with pytest.raises(FileNotFoundError):
            subprocess.run(["/nowhere/g++", "a.cpp"], check=True)

    with watching(tmp_path / "root") as seen:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with watching(tmp_path / "elsewhere") as other:
            inside.read_bytes()
    inside.read_text()
    assert seen.launches == ["g++ a.cpp"]
    assert seen.used == {"ab/file"}
    assert other.used == set()
