"""A process that has imported torch and does nothing but fork: fresh processes in milliseconds.

``template.py`` reads one order a line from standard input and answers each with one line, both JSON.
"start" forks a process with its own environment, folder and output files, that calls a function;
"poll" tells how such a process ended.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import traceback
from pathlib import Path

PRELOADED = (
    "torch._dynamo.convert_frame",
    "torch._dynamo.symbolic_convert",
    "torch._dynamo.backends.inductor",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "torch._inductor.runtime.compile_tasks",
    "torch._functorch.aot_autograd",
    "torch.distributed",
    "compilecache.cli.warm",
    "compilecache.cli.publish",
    "compilecache.cli.restore",
    "compilecache.cli.verify",
    "compilecache.adopt",
    "compilecache.ensure",
    "compilecache.fresh",
    "compilecache.planning",
    "compilecache.s3",
    "warmup.service.server",
)
"""What every process of these tests imports sooner or later; importing it runs nothing."""


def child(order: dict[str, str]) -> None:
    """One fresh process: calls the function and leaves its result in a file."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    for descriptor, name in ((0, os.devnull), (1, order["stdout"]), (2, order["stderr"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    module, _, name = order["function"].partition(":")
    with Path(order["arguments"]).open("rb") as file:
        arguments, keywords = pickle.load(file)
    with Path(order["result"]).open("wb") as file:
        pickle.dump(getattr(importlib.import_module(module), name)(*arguments, **keywords), file)


def exit_code(order: dict[str, str]) -> int:
    """Runs the process and gives the exit code that Python itself would give it."""
    code = 1
    try:
        child(order)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def start(order: dict[str, str]) -> int:
    """The id of a new process."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = exit_code(order)
        finally:
            os._exit(code)
    return pid


def poll(order: dict[str, int]) -> int | None:
    """How it ended, negative for a signal; None while it runs."""
    pid, status = os.waitpid(order["pid"], os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def main() -> None:
    """Imports, says so, obeys until its input ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    from torch._inductor.codecache import torch_key

    torch_key()  # half a second of hashing torch's sources, the same in every process
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps((start if order["act"] == "start" else poll)(order)), flush=True)


if __name__ == "__main__":
    main()
