"""One way to fetch objects, timed in a process of its own: ``python s3_clients.py WAY ENDPOINT KEYS``.

KEYS: a file with names of objects, a line each. For every line on standard input, a folder: fetches all
objects into it with a client that is made anew, and prints seconds and seconds of processor time, imports and
start of the process left out. The plain ways write each object to a file and look at nothing.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trees import aside

BUCKET = "bench"
KEY, SECRET, REGION = "key", "secret", "us-east-1"
BLOCK_BYTES = 1 << 20


def plain_boto3(endpoint: str, keys: list[str], folder: Path, workers: int) -> None:
    """``download_file`` in threads, as boto3's documentation has it."""
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name=REGION,
        config=Config(max_pool_connections=50),
    )

    def fetch(key: str) -> None:
        client.download_file(BUCKET, key, str(folder / key.rpartition("/")[2]))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(fetch, keys))


def plain_aiobotocore(endpoint: str, keys: list[str], folder: Path, workers: int) -> None:
    """``get_object``, its stream written to a file, several at a time."""
    from aiobotocore.session import get_session

    async def fetch_all() -> None:
        turns = asyncio.Semaphore(workers)
        async with get_session().create_client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=REGION,
        ) as client:

            async def fetch(key: str) -> None:
                async with turns:
                    answer = await client.get_object(Bucket=BUCKET, Key=key)
                    with (folder / key.rpartition("/")[2]).open("wb", buffering=0) as file:
                        async with answer["Body"] as body:
                            while block := await body.read(BLOCK_BYTES):
                                file.write(block)

            await asyncio.gather(*map(fetch, keys))

    asyncio.run(fetch_all())


def aws_cli(endpoint: str, keys: list[str], folder: Path, workers: int) -> None:
    """``aws s3 cp --recursive``; the start of its process counts, as it does for whoever types it."""
    prefix = keys[0].rpartition("/")[0]
    words = [
        "s3",
        "cp",
        "--recursive",
        "--only-show-errors",
        f"s3://{BUCKET}/{prefix}",
        str(folder),
    ]
    environment = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": REGION,
    }
    command = [sys.executable, "-m", "awscli", "--endpoint-url", endpoint, *words]
    subprocess.run(command, check=True, env=environment)


def fetch_only(endpoint: str, keys: list[str], folder: Path, workers: int) -> None:
    """The product's reader, objects written to files as they are: no digests, nothing unpacked."""
    store = opened(endpoint)

    def fetch(key: str) -> None:
        blob = store.storage.open(key)
        with (folder / key.rpartition("/")[2]).open("wb", buffering=0) as file:
            at = 0
            while at < blob.size:
                data = blob.read_at(at, store.storage.block_bytes)
                file.write(data)
                at += len(data)
        blob.close()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(fetch, keys))


def whole_restore(endpoint: str, keys: list[str], folder: Path, workers: int) -> None:
    """The product: records, packs, digests, files in place."""
    from restore import restore

    restore(opened(endpoint), [f"adopted-{number}" for number in range(len(keys))], folder)


def opened(endpoint: str):  # type: ignore[no-untyped-def]
    """The store that the objects are."""
    from compilecache.store import ArtifactStore

    options = {"endpoint_url": endpoint, "key": KEY, "secret": SECRET}
    return ArtifactStore.open(f"s3://{BUCKET}", storage_options=options)


WAYS: dict[str, tuple[Callable[[str, list[str], Path, int], None], int]] = {
    "boto3": (plain_boto3, 4),
    "boto3 x8": (plain_boto3, 8),
    "aiobotocore": (plain_aiobotocore, 8),
    "aws s3 cp": (aws_cli, 0),
    "fetch only": (fetch_only, 8),
    "restore": (whole_restore, 0),
}
"""Name → how, and how many at a time."""


def processor_seconds() -> float:
    """Of this process and of those it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    """Fetches as often as it is asked to."""
    way, endpoint, listing = sys.argv[1:]
    keys = Path(listing).read_text(encoding="utf-8").split()
    act, workers = WAYS[way]
    for line in sys.stdin:
        folder = Path(line.strip())
        if folder.exists():
            aside(folder)
        folder.mkdir(mode=0o700)
        began, used = time.perf_counter(), processor_seconds()
        act(endpoint, keys, folder, workers)
        took = time.perf_counter() - began, processor_seconds() - used
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
