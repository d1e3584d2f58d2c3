"""Who could replace what lies at a path: owners and modes up to ``/``, links included.

Whoever may write to a folder may rename what lies in it and put something else there.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from compilecache.errors import UntrustedArtifact

TRUSTED_FOLDERS = "COMPILECACHE_TRUSTED_FOLDERS"
MOST_LINKS = 40
"""As many as Linux follows."""


def refuse_foreign(path: Path) -> None:
    """Raises UntrustedArtifact when anybody but this user and root could replace what is at ``path``.

    Looked at are the file or folder itself, every folder above it and every link on the way; but
    not what lies below a folder that lets nobody else in, nor folders that
    ``COMPILECACHE_TRUSTED_FOLDERS`` names. Raises OSError when something cannot be looked at.
    """
    named = os.environ.get(TRUSTED_FOLDERS, "").split(os.pathsep)
    trusted = {os.path.realpath(folder) for folder in named if folder}
    target = os.path.realpath(path)
    for step in _steps(Path.cwd() / path):
        last = str(step) == target
        if str(step) in trusted or (not last and _out_of_reach(step)):
            continue
        status = os.lstat(step)
        if problem := _problem(status, last):
            raise UntrustedArtifact(
                f"'{step}'{'' if last else f', on the way to {str(path)!r},'} {problem} (mode "
                f"{stat.S_IMODE(status.st_mode):o}): others could plant code in it",
                next_step=_next_step(step, status, last),
            )


def _steps(path: Path) -> Iterator[Path]:
    """``/``, then every folder and link that decides where a path leads."""
    here, links = Path("/"), 0
    pending = list(reversed(path.parts[1:]))
    yield here
    while pending:
        name = pending.pop()
        step = here.parent if name == ".." else here / name
        yield step
        if not step.is_symlink():
            here = step
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(f"too many links on the way to '{path}'")
        target = step.readlink()
        here = Path("/") if target.is_absolute() else here
        pending += [part for part in reversed(target.parts) if part != "/"]


def _problem(status: os.stat_result, last: bool) -> str | None:
    """Who else may replace it, or what lies in it, in words; None when nobody can."""
    if not _may_own(status.st_uid, last):
        return f"belongs to uid {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return None
    if not last and status.st_mode & stat.S_ISVTX:
        return None  # as in /tmp: only its owner may rename an entry
    if status.st_mode & stat.S_IWOTH:
        return "can be written by everybody"
    if status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid):
        return f"can be written by the group '{_group_name(status.st_gid)}'"
    return None


def _next_step(step: Path, status: os.stat_result, last: bool) -> str:
    otherwise = (
        f"a place of your own, or name '{step}' in {TRUSTED_FOLDERS} if nobody you distrust can "
        "write it"
    )
    if not _may_own(status.st_uid, last):
        return f"Use {otherwise}"
    mode = "700" if last and stat.S_ISDIR(status.st_mode) else "go-w"
    return f"Run: chmod {mode} '{step}'. Or use {otherwise}"


def _may_own(uid: int, last: bool) -> bool:
    """This user and root; above the place itself also whoever has no number in this container."""
    return uid in (0, os.geteuid()) or (not last and not _is_mapped(uid))


def _is_mapped(uid: int) -> bool:
    """Whether a user id stands for anybody in this user namespace: all from outside are "nobody"."""
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    except OSError:
        return True
    ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    return any(first <= uid < first + count for first, count in ranges)


def _is_private(gid: int) -> bool:
    """Whether a group is root's, this user's own, or one that nobody is known to be in."""
    name = _group_name(gid)
    return gid == 0 or name is None or name == _user_name()


def _group_name(gid: int) -> str | None:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return None


def _user_name() -> str | None:
    """140765: a container's user may have no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return None


def _out_of_reach(step: Path) -> bool:
    """Whether a folder above lets nobody else in, so that modes below it do not matter."""
    return any(_is_closed(os.lstat(folder)) for folder in step.parents)


def _is_closed(status: os.stat_result) -> bool:
    to_group = status.st_mode & stat.S_IXGRP and not _is_private(status.st_gid)
    return status.st_uid in (0, os.geteuid()) and not to_group and not status.st_mode & stat.S_IXOTH
