"""Where tests keep what they work on: roots, stores, plans, and a server for them."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from training import Trained

from compilecache.shapes import ShapePlan


@dataclass(frozen=True)
class Place:
    """A cache root, a store, and the plan they belong to, in folders of their own."""

    folder: Path

    @property
    def root(self) -> Path:
        """The cache root; may not exist yet."""
        return self.folder / "root"

    @property
    def store(self) -> Path:
        """The store; may not exist yet."""
        return self.folder / "store"

    @property
    def plan_file(self) -> Path:
        """Where the plan is written."""
        return self.folder / "plan.yaml"

    @property
    def plan(self) -> ShapePlan:
        """The plan."""
        return ShapePlan.load(self.plan_file)

    def write(self, plan: ShapePlan) -> Path:
        """Makes this the plan."""
        self.plan_file.write_text(plan.dump())
        return self.plan_file

    @property
    def words(self) -> tuple[object, ...]:
        """Plan, device, root and store as a command takes them."""
        return (self.plan_file, "--device", "cpu", "--root", self.root, "--store", self.store)


@dataclass(frozen=True)
class Cold:
    """A warm-up that had to compile, and where it left its root and store."""

    place: Place
    trained: Trained

    def seed(self, root: Path) -> None:
        """Copies the libraries by which torch asks what the CPU can: the same for every model."""
        for path in self.place.root.glob("??/*.so"):
            if not path.name.endswith(".main.so"):
                copy = root / path.relative_to(self.place.root)
                copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                shutil.copyfile(path, copy)


@dataclass(frozen=True)
class S3Server:
    """A moto server over HTTP."""

    url: str

    def bucket(self) -> str:
        """The address of a store in a bucket of its own."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=name)
        client.close()
        return f"s3://{name}/cache"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it, as a user would set it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
