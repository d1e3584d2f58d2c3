"""What a service is told when it starts: a YAML file, and options that stand above it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from compilecache.errors import PlanError, UntrustedArtifact

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
LEAST_TOKEN = 16
"""Letters of a token; a shorter one can be guessed."""

Seconds = Annotated[float, Field(gt=0)]


def default_state() -> Path:
    """``$XDG_STATE_HOME/compilecache/warmup``."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home, "compilecache", "warmup")


class Settings(BaseModel):
    """Everything that can be configured; every field has a row in docs/service.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workloads: tuple[str, ...] = ()
    """The allow-list: only these ``module:attribute`` can be named, since naming one runs its module."""
    compile_options: tuple[str, ...] = ()
    """Compile options that plans may set besides the harmless ones. "options" can name a compiler."""
    devices: tuple[str, ...] = ()
    """Devices that plans may be warmed on, and are when they name none. Empty: every GPU, else the CPU."""
    root: Path | None = None
    """Cache root; None: the library's default."""
    store: str | None = None
    """Address of the artifact store, or "none"; None: the library's default."""
    baked: Path | None = None
    """Cache that came with the image; None: ``COMPILECACHE_BAKED``, else there is none."""
    extra_roots: tuple[str, ...] = ()
    """Caches of other compilers, NAME or NAME=DIR."""
    sign_key: Path | None = None
    """Private key that signs what is published."""
    trust_keys: tuple[Path, ...] = ()
    """Public keys; what none of them signed is not used."""
    state: Path = Field(default_factory=default_state)
    """Folder of the queue and of the workers' logs."""
    host: str = "127.0.0.1"
    """Address to listen at. Everything but loopback needs a token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8480
    """0 takes a free one."""
    hosts: tuple[str, ...] = ()
    """Further names that the service is called by: requests to others are refused."""
    token_file: Path | None = None
    """File with the token; readable for its owner alone, or root's."""
    target_deadline: Seconds = 3600.0
    """A target that takes longer is ended and reported."""
    job_deadline: Seconds = 86400.0
    """Likewise for all targets of a job, waiting for others included."""
    lock_timeout: Seconds = 3600.0
    """How long a worker waits for another writer of the root, or for who has claimed a target."""
    grace: Annotated[float, Field(ge=0)] = 30.0
    """How long a stop waits for the target in hand before giving it back to the queue."""
    share: bool = True
    """Whether hosts on one store divide targets among them."""
    keep_jobs: Annotated[int, Field(ge=1)] = 5000
    """Jobs that have ended and are kept; older ones are forgotten. Their artifacts stay."""

    @field_validator("workloads")
    @classmethod
    def _names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        bad = [name for name in names if not all(name.partition(":"))]
        if bad:
            raise ValueError(f"'{bad[0]}' is not of the form module:attribute")
        return tuple(dict.fromkeys(names))

    @model_validator(mode="after")
    def _needs_a_token(self) -> Self:
        if self.host not in LOOPBACK and self.token_file is None:
            raise ValueError(
                f"host '{self.host}' can be reached from elsewhere and there is no token; "
                "name its file with --token-file"
            )
        return self

    @classmethod
    def load(
        cls,
        path: Path | None,
        changes: Mapping[str, object],
        *,
        more_workloads: Sequence[str] = (),
    ) -> Self:
        """The file's settings, some of them replaced, and its allow-list made longer.

        Raises PlanError naming the field.
        """
        given = _read(path) if path is not None else {}
        listed = given.get("workloads", [])
        if more_workloads and isinstance(listed, list):
            given = {**given, "workloads": [*listed, *more_workloads]}
        source = f"settings file '{path}'" if path is not None else "settings"
        try:
            return cls.model_validate({**given, **changes})
        except ValidationError as error:
            faults = [(".".join(map(str, f["loc"])), f["msg"]) for f in error.errors()]
            raise PlanError(
                f"{source}: " + "; ".join(f"'{at}': {why}" if at else why for at, why in faults),
                next_step="See the table of settings in docs/service.md",
                field=faults[0][0],
            ) from error

    def read_token(self) -> str | None:
        """The token; None without one. Raises PlanError or UntrustedArtifact for its file."""
        return None if self.token_file is None else read_token(self.token_file)


def _read(path: Path) -> dict[str, object]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PlanError(
            f"settings file '{path}' cannot be read: {' '.join(str(error).split())}",
            next_step="Write it as YAML; docs/service.md has an example",
        ) from error
    if not isinstance(data, dict):
        raise PlanError(f"settings file '{path}' holds no mapping", next_step="See docs/service.md")
    return data


def read_token(path: Path) -> str:
    """The first line of a token file that nobody else can read."""
    try:
        status = path.stat()
        token = path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"token file '{path}' cannot be read: {error}",
            next_step="Name a text file with one line with --token-file",
            field="token_file",
        ) from error
    forbidden = 0o077 if status.st_uid == os.geteuid() else 0o007
    if stat.S_IMODE(status.st_mode) & forbidden or status.st_uid not in (0, os.geteuid()):
        raise UntrustedArtifact(
            f"token file '{path}' can be read by others", next_step=f"Run: chmod 600 {path}"
        )
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
        raise PlanError(
            f"the token in '{path}' is shorter than {LEAST_TOKEN} letters, or no plain text",
            next_step=f"Make one: openssl rand -hex 24 > {path}",
            field="token_file",
        )
    return token


def find_devices() -> tuple[str, ...]:
    """Every GPU that torch sees, else the CPU; asked in a process of its own, so ours needs no torch."""
    program = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    count = int(done.stdout or 0) if done.returncode == 0 else 0
    return tuple(f"cuda:{index}" for index in range(count)) or ("cpu",)
