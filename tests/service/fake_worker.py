"""A worker that compiles nothing: what it does with a target is written in the target's spec.

``dims.act``: "quick" (the default), "slow" (half a second), "hang", "crash", "fail", "bypass". It says of which
GPU it was given a profile, and which GPUs it sees, if it was given one. It leaves a
line in ``$FAKE_LOG`` for every target that it begins, and again when it has done it. Standard library
only, so that a thousand of them start within a minute.
"""

import json
import os
import signal
import sys
import threading
import time


def say(**line: object) -> None:
    """One line to the service."""
    os.write(1, json.dumps(line).encode() + b"\n")


def note(word: str, key: str) -> None:
    """One line in the log, whole even when the process is killed."""
    path = os.environ.get("FAKE_LOG")
    if path:
        with open(path, "a") as file:  # noqa: PTH123 - as few imports as possible
            file.write(f"{word} {key}\n")


def words_of(spec: dict) -> str:  # type: ignore[type-arg]
    """As ``InputSpec.__str__``."""
    dims = " ".join(f"{name}={value}" for name, value in spec["dims"].items())
    return f"{spec['function']} {spec['phase']} {dims}".strip()


stopping = threading.Event()


def obey() -> None:
    """As the real worker does."""
    for line in sys.stdin:
        if line == "stop\n":
            stopping.set()
    os.killpg(0, signal.SIGKILL)


def evidence(outcome: str, seconds: float) -> dict:  # type: ignore[type-arg]
    """As the library gives it."""
    missed = int(outcome == "miss")
    counts = {"hits": 0, "misses": missed, "bypasses": int(outcome == "bypass"), "launches": missed}
    return {"outcome": outcome, **counts, "seconds": seconds, "again_seconds": 0.001}


def do(key: str, words: str, device: str, act: str) -> None:
    """One target."""
    what = f"{words} on {device}"
    say(said="doing", phase="compiling", key=key, what=what)
    note("began", key)
    began = time.monotonic()
    if act == "crash":
        print("fatal: the compiler has eaten itself", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep({"slow": 0.5, "hang": 3600.0}.get(act, 0.0))
    seen = evidence("bypass" if act == "bypass" else "miss", time.monotonic() - began)
    row = {"key": key, "target": what, "device": device, "status": "compiled", "evidence": seen}
    if act == "fail":
        row |= {"status": "failed", "evidence": None, "error": "no such shape. Plan another one."}
    note("ended", key)
    say(said="finished", row={**row, "bytes": 1000, "published": act != "fail"})


def main() -> None:
    """Carries out one order."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=obey, daemon=True).start()
    say(said="fingerprint", digest="fe" * 16)
    if order["kind"] == "explain":
        say(said="explained", explanation=explanation(order))
        say(said="ended", stopped=False)
        return
    if order["profile"] is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        say(said="trouble", text=f"for {order['profile']['name']}, GPUs in sight: {seen or 'none'}")
    specs = order["plan"]["specs"]
    for position in order["positions"]:
        device, spec = order["devices"][position // len(specs)], specs[position % len(specs)]
        words = words_of(spec)
        key = key_of(order, position)
        do(key, words, device, str(spec["dims"].get("act", "quick")))
        if stopping.is_set():
            say(said="ended", stopped=True)
            return
    say(said="ended", stopped=False)


def explanation(order: dict) -> dict:  # type: ignore[type-arg]
    """What the library would find where quick targets are there and the others are not."""
    specs = order["plan"]["specs"]
    rows = []
    for position in order["positions"]:
        spec = specs[position % len(specs)]
        found = {"key": key_of(order, position), "engine": None, "changed": {}, "faults": []}
        quick = spec["dims"].get("act", "quick") == "quick"
        rows.append({**found, "state": "local" if quick else "missing"})
    torch = {"because": "it enters torch's own keys", "matters": True}
    return {
        "warm": False,
        "targets": rows,
        "nearest": {
            "digest": "ab" * 16,
            "targets": 7,
            "changed": {"torch": ["2.11.0 <b>abc</b>", "2.13.0 def"]},
            "weights": {"torch": torch},
        },
        "trouble": None,
        "untrusted": [],
        "next_step": "Run 'compilecache warm' with the same plan: it compiles what is missing",
    }


def key_of(order: dict, position: int) -> str:  # type: ignore[type-arg]
    """The target's key, as ``CompileTarget.key`` makes it."""
    import hashlib

    specs = order["plan"]["specs"]
    device, spec = order["devices"][position // len(specs)], specs[position % len(specs)]
    usual = {"function": "forward", "phase": "train", "dtype": "float32", "dims": {}}
    content = {
        name: value
        for name, value in spec.items()
        if value != usual.get(name, 0 if name == "positional" else None)
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{device.replace(':', '')}-{spec['function']}-{spec['phase']}-{digest}"


if __name__ == "__main__":
    main()
