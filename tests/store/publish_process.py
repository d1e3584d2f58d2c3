"""A publisher in a process of its own, driven by tests: ``publish_process.py JSON``.

Says "ready" once everything is imported, waits for a line, publishes, prints what the store holds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from store_samples import sample

from compilecache.errors import StoreUnavailable
from compilecache.store import ArtifactStore


def main() -> None:
    """Publishes ``seeds`` one after the other, each ``times`` times under its own key or one key."""
    task = json.loads(sys.argv[1])
    store = ArtifactStore.open(task["url"], storage_options=task.get("options"), budget_seconds=30)
    with tempfile.TemporaryDirectory() as folder:
        made = [
            sample(Path(folder), seed, key=task.get("key", f"adopted-{seed}"), size=task["size"])
            for seed in task["seeds"]
        ]
        if task.get("user") is not None:
            Path(folder).chmod(0o755)
            os.setuid(task["user"])
        print("ready", flush=True)
        sys.stdin.readline()
        for record, pack in made:
            mine = record.model_copy(update={"environment": {"process": str(os.getpid())}})
            try:
                print(store.publish(mine, pack).dump().decode(), end="", flush=True)
            except StoreUnavailable as error:
                print(json.dumps({"error": str(error)}), flush=True)
        if task.get("user") is not None:
            os._exit(0)


if __name__ == "__main__":
    main()
