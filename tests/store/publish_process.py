"""Publishers in processes of their own, driven by tests: ``publish_process.py JSON FOLDER``.

Imports everything once, then forks one publisher a task. Prints their pids once all are ready, starts
number N on the line "N", and ends when all have. Publisher N writes what the store then holds to
``FOLDER/N.out``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from store_samples import sample

from compilecache import s3  # noqa: F401 - imported once, before the forks
from compilecache.store import ArtifactStore


def publish(task: dict[str, object], number: int, folder: Path, start: int, ready: int) -> None:
    """One publisher, after its fork."""
    store = ArtifactStore.open(task["url"], storage_options=task["options"], budget_seconds=30)
    made = []
    for seed in task["seeds"]:
        key = task.get("key", f"adopted-{seed}")
        record, pack = sample(folder / str(number), seed, key=key, size=task["size"])
        pack.chmod(0o644)
        made.append((record.model_copy(update={"environment": {"process": str(number)}}), pack))
    with (folder / f"{number}.out").open("w", encoding="utf-8") as out:
        if task.get("user") is not None:
            os.setuid(task["user"])
        os.write(ready, b"x")
        os.read(start, 1)
        for record, pack in made:
            try:
                out.write(store.publish(record, pack).dump().decode())
            except Exception as error:  # whatever it is, it is what the test is about
                out.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


def main() -> None:
    """Forks, starts on command, waits."""
    folder = Path(sys.argv[2])
    ready, all_ready = os.pipe()
    starts, children = [], []
    for number, task in enumerate(json.loads(sys.argv[1])):
        start, started = os.pipe()
        starts.append(started)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                publish(task, number, folder, start, all_ready)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    for _ in children:
        os.read(ready, 1)
    print(*children, flush=True)
    for line in sys.stdin:
        os.write(starts[int(line)], b"x")
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
