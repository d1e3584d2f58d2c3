"""Where faults are tried: processes, stores, a server, and scenes that are published already."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import boto3
from pod import Said, Task, run
from processes import Running, Template
from proxy import Proxy, proxy
from scene import Scene

from compilecache.storage import LocalStorage
from compilecache.store import ArtifactStore

KEYS = {"key": "testing", "secret": "testing"}
PATIENCE = 60.0
"""Seconds after which a pod that has not ended counts as hanging."""
IMPATIENT = {"connect_timeout": 1.0, "read_timeout": 0.5}
IMPATIENT_BUDGET = 4.0
"""Instead of 10 s for an answer and 120 s for a store, so that 30 s of silence cost one second."""


@dataclass(frozen=True)
class Address:
    """A store as pods and the audit reach it."""

    url: str
    endpoint: str | None = None
    """Of its S3 server; None for a directory."""

    def options(self, endpoint: str | None = None) -> dict[str, object]:
        """For s3fs; through another endpoint if one is given."""
        if self.endpoint is None:
            return {}
        return {"endpoint_url": endpoint or self.endpoint, **KEYS}

    @property
    def objects(self) -> Objects:
        """What lies in it, past its own checks."""
        return Objects(self)

    def mirror(self, folder: Path) -> ArtifactStore:
        """A store in a directory with the same objects: itself, if it is one."""
        if self.endpoint is None:
            return ArtifactStore.open(self.url)
        shutil.rmtree(folder, ignore_errors=True)
        copy = Address(str(folder))
        for name, data in self.objects.all().items():
            copy.objects.put(name, data)
        return ArtifactStore.open(folder)


@dataclass(frozen=True)
class Pace:
    """How long a run takes that nothing befalls."""

    operations: int
    seconds: float
    requests: int


class Ground:
    """What all trials share. May be used from several threads, each with a lane of its own."""

    def __init__(self, fresh: Template, endpoint: str, folder: Path) -> None:
        self.fresh = fresh
        self.endpoint = endpoint
        self.folder = folder
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._published: dict[tuple[Scene, bool], Address] = {}
        self._paces: dict[tuple[bool, bool, int], Pace] = {}

    def new_folder(self) -> Path:
        """An empty one."""
        folder = self.folder / f"{next(self._numbers):05}"
        folder.mkdir(parents=True)
        return folder

    def new_address(self, *, s3: bool, folder: Path) -> Address:
        """An empty store."""
        if s3:
            # A bucket of its own: the server cannot list one while another thread deletes from it.
            client_of(self.endpoint).create_bucket(Bucket=f"faults-{folder.name}")
            return Address(f"s3://faults-{folder.name}/cache", self.endpoint)
        return Address(str(folder / "store"))

    def start(self, task: Task) -> Running:
        """A pod, running."""
        task.said.parent.mkdir(parents=True, exist_ok=True)
        return self.fresh.start(run, task)

    def finish(self, pod: Running) -> Said:
        """What it says at its end; a word about it when it says nothing."""
        try:
            ended = pod.wait(PATIENCE)
        except AssertionError as error:
            return Said(crash=str(error))
        if ended.code:
            return Said(crash=f"ended with {ended.code}: {ended.err[-2000:]}")
        said = pod.result()
        assert isinstance(said, Said)
        return said

    # -- what many trials begin with ------------------------------------------------------------

    def published(self, scene: Scene, *, s3: bool) -> Address:
        """A store that has all of a scene. Not to be harmed."""
        with self._lock:
            known = self._published.get((scene, s3))
            if known is None:
                folder = self.new_folder()
                known = self.new_address(s3=s3, folder=folder)
                said = self._walk_through(scene, known, folder, restores=False)
                assert not said.troubles, said
                self._published[scene, s3] = known
        return known

    def copy(self, address: Address, folder: Path) -> Address:
        """A store with the same objects, to do harm to."""
        other = self.new_address(s3=address.endpoint is not None, folder=folder)
        if address.endpoint is None:
            shutil.copytree(address.url, other.url)
        else:
            for name, data in address.objects.all().items():
                other.objects.put(name, data)
        return other

    def pace(self, scene: Scene, *, s3: bool, restores: bool) -> Pace:
        """Of a run on an empty root that nothing befalls; taken once for each size."""
        kind = (s3, restores, scene.size)
        if kind not in self._paces:
            address = self.published(scene, s3=s3)
            with self._lock, ExitStack() as stack:
                folder = self.new_folder()
                if not restores:
                    address = self.new_address(s3=s3, folder=folder)
                counting = stack.enter_context(proxy(self.endpoint))
                counting.begin()
                said = self._walk_through(scene, address, folder, restores, counting)
                self._paces[kind] = Pace(said.operations, said.seconds, counting.requests)
        return self._paces[kind]

    def _walk_through(
        self,
        scene: Scene,
        address: Address,
        folder: Path,
        restores: bool,
        counting: Proxy | None = None,
    ) -> Said:
        task = Task(scene, folder / "root", address.url, folder / "said", restores=restores)
        task = replace(task, options=address.options(counting.url if counting else None))
        said = self.finish(self.start(task))
        assert not (said.missing or said.refused or said.error or said.crash), said
        shutil.rmtree(folder / "root")
        return said


class Objects:
    """The objects of a store, whatever they are."""

    def __init__(self, address: Address) -> None:
        self._address = address
        _, _, path = address.url.partition("://")
        self._bucket, _, prefix = path.partition("/")
        self._prefix = f"{prefix}/"

    def all(self) -> dict[str, bytes]:
        """By name."""
        return {name: self._get(name) for name in self._names()}

    def _names(self) -> list[str]:
        if self._address.endpoint is None:
            return [f"v1/{name}" for name in LocalStorage(Path(self._address.url)).walk("v1")]
        client = client_of(self._address.endpoint)
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        found = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return [name.removeprefix(self._prefix) for name in found]

    def _get(self, name: str) -> bytes:
        if self._address.endpoint is None:
            return (Path(self._address.url) / name).read_bytes()
        client = client_of(self._address.endpoint)
        data: bytes = client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        """Writes one, whatever is there."""
        if self._address.endpoint is None:
            path = Path(self._address.url) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        else:
            client = client_of(self._address.endpoint)
            client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=data)

    def drop(self) -> None:
        """Removes all of them from a server, whose memory they take."""
        if self._address.endpoint is not None and (names := self._names()):
            keys = [{"Key": self._prefix + name} for name in names]
            client_of(self._address.endpoint).delete_objects(
                Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True}
            )


@cache
def client_of(endpoint: str):  # type: ignore[no-untyped-def]
    """One for all threads."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEYS["key"],
        aws_secret_access_key=KEYS["secret"],
        region_name="us-east-1",
    )


@contextmanager
def lane(ground: Ground) -> Iterator[Proxy]:
    """What one thread of trials has to itself."""
    with proxy(ground.endpoint) as own:
        yield own
