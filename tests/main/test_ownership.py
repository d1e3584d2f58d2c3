"""Who could replace what lies at a path: folders above it, links on the way, groups, containers."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compilecache.cachedir import CacheDir
from compilecache.errors import UntrustedArtifact
from compilecache.ownership import TRUSTED_FOLDERS, refuse_foreign

STRANGER = 12345
SHARED_GROUP = 100
"""``users``, where there is one."""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@contextmanager
def within_reach() -> Iterator[Path]:
    """A folder that everybody may look into: pytest's own are closed, so nothing is checked."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        if not all(parent.stat().st_mode & stat.S_IXOTH for parent in folder.parents):
            pytest.skip("temporary files lie in a closed folder")
        yield folder


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """The same for a whole test."""
    with within_reach() as folder:
        yield folder


def root_in(folder: Path) -> Path:
    """A cache root three folders down, each 0755."""
    for name in ("one", "two", "root"):
        folder = folder / name
        folder.mkdir()
        folder.chmod(0o755)
    return folder


def refusal(path: Path) -> str:
    """What the error says."""
    with pytest.raises(UntrustedArtifact) as caught:
        refuse_foreign(path)
    return str(caught.value)


def test_ordinary_places_are_fine(open_folder: Path, tmp_path: Path) -> None:
    """Below /tmp, below pytest's folders, with parents that everybody can read; a file, too."""
    for folder in (open_folder, tmp_path):
        refuse_foreign(root_in(folder))
    (tmp_path / "file").touch()
    refuse_foreign(tmp_path / "file")


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o773])
def test_a_parent_that_everybody_can_write(open_folder: Path, mode: int) -> None:
    """The error names the folder, the root and the chmod; the chmod mends it."""
    root = root_in(open_folder)
    (open_folder / "one").chmod(mode)
    said = refusal(root)
    assert f"'{open_folder}/one', on the way to '{root}', can be written by everybody" in said
    assert f"chmod go-w '{open_folder}/one'" in said
    (open_folder / "one").chmod(mode & 0o755)
    refuse_foreign(root)


def test_a_sticky_parent_is_fine_and_a_sticky_root_is_not(open_folder: Path) -> None:
    """As /tmp: nobody can rename what is another's. But everybody could add files to the root."""
    root = root_in(open_folder)
    (open_folder / "one").chmod(0o1777)
    refuse_foreign(root)
    root.chmod(0o1777)
    assert f"chmod 700 '{root}'" in refusal(root)


@needs_root
def test_a_parent_that_belongs_to_somebody_else(open_folder: Path) -> None:
    """Its owner could rename what lies in it."""
    root = root_in(open_folder)
    os.chown(open_folder / "one", STRANGER, -1)
    said = refusal(root)
    assert f"'{open_folder}/one'" in said and f"belongs to uid {STRANGER}" in said
    assert "chmod" not in said and TRUSTED_FOLDERS in said


@needs_root
def test_what_nobody_else_can_reach_may_have_any_mode(open_folder: Path) -> None:
    """Below a closed folder; but the root itself is looked at all the same."""
    root = root_in(open_folder)
    (open_folder / "one").chmod(0o700)
    (open_folder / "one/two").chmod(0o777)
    os.chown(open_folder / "one/two", STRANGER, STRANGER)
    refuse_foreign(root)
    root.chmod(0o777)
    refusal(root)


@needs_root
def test_groups(open_folder: Path) -> None:
    """Root's, and one that nobody is known to be in, are as good as one's own; others are not."""
    import grp

    root = root_in(open_folder)
    (open_folder / "one").chmod(0o775)
    for gid in (0, 54321):
        os.chown(open_folder / "one", -1, gid)
        refuse_foreign(root)
    try:
        name = grp.getgrgid(SHARED_GROUP).gr_name
    except KeyError:
        pytest.skip("there is no group 100")
    os.chown(open_folder / "one", -1, SHARED_GROUP)
    assert f"can be written by the group '{name}'" in refusal(root)
    (open_folder / "one").chmod(0o755)
    refuse_foreign(root)


def test_a_link_to_a_root(open_folder: Path) -> None:
    """Where it leads is checked, and so is the way there."""
    root = root_in(open_folder)
    link = open_folder / "link"
    link.symlink_to("one/../one/two")
    refuse_foreign(link / "root")
    (open_folder / "one").chmod(0o777)
    assert f"'{open_folder}/one'" in refusal(link / "root")
    (open_folder / "one").chmod(0o755)
    root.chmod(0o777)
    assert "chmod 700" in refusal(link / "root")


@needs_root
def test_a_link_of_somebody_else(open_folder: Path) -> None:
    """In a sticky folder it is its owner who decides where it leads."""
    root = root_in(open_folder)
    link = open_folder / "link"
    link.symlink_to(root)
    os.chown(link, STRANGER, -1, follow_symlinks=False)
    assert f"'{link}'" in refusal(link)


def test_dots_are_followed_as_the_system_follows_them(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a link's target, not above the link; also for a path relative to where one stands."""
    root_in(open_folder)
    (open_folder / "link").symlink_to("one/two")
    (open_folder / "one/file").touch()
    (open_folder / "one/file").chmod(0o666)
    monkeypatch.chdir(open_folder)
    for path in (open_folder / "link/../file", Path("link/../file")):
        assert f"'{open_folder}/one/file' can be written by everybody" in refusal(path)


def test_links_in_a_circle(open_folder: Path) -> None:
    """An error, not an endless walk."""
    (open_folder / "a").symlink_to("b")
    (open_folder / "b").symlink_to("a")
    with pytest.raises(OSError, match="too many links"):
        refuse_foreign(open_folder / "a" / "root")


def test_a_folder_that_is_trusted_by_name(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod's emptyDir has mode 0777: whoever wrote the pod knows who mounts it."""
    root = root_in(open_folder)
    (open_folder / "one").chmod(0o777)
    monkeypatch.setenv(TRUSTED_FOLDERS, f"/nowhere{os.pathsep}{open_folder / 'one'}")
    refuse_foreign(root)
    (open_folder / "one/two").chmod(0o777)
    assert "one/two" in refusal(root)


def test_a_cache_root_is_checked_up_the_path(open_folder: Path) -> None:
    """Also one that ``prepare`` makes, with the folders above it: those are for their owner alone."""
    cache = CacheDir(open_folder / "a" / "b" / "root")
    before = os.umask(0)
    try:
        cache.prepare()
    finally:
        os.umask(before)
    assert (open_folder / "a").stat().st_mode & 0o777 == 0o700
    for folder in ("a", "a/b"):
        (open_folder / folder).chmod(0o777)
    with pytest.raises(UntrustedArtifact, match=r"/a', on the way to .*chmod go-w"):
        cache.prepare()


def test_a_cache_root_with_a_foreign_folder_of_ours(tmp_path: Path) -> None:
    """``.compilecache`` holds the records that are believed."""
    cache = CacheDir(tmp_path / "root")
    cache.prepare()
    (cache.root / ".compilecache").chmod(0o777)
    with pytest.raises(UntrustedArtifact, match=r"chmod 700 '.*/\.compilecache'"):
        cache.prepare()


@given(st.lists(st.sampled_from([0o755, 0o700, 0o1777, 0o777]), min_size=4, max_size=4))
def test_it_is_refused_if_and_only_if_somebody_else_can_get_there(modes: list[int]) -> None:
    """The last is the root. Open to writers, not sticky, and nothing closed above it."""
    with within_reach() as folder:
        chain = [folder := folder / str(number) for number in range(len(modes))]
        for path, mode in zip(chain, modes, strict=True):
            path.mkdir()
            path.chmod(mode)
        bad = modes[-1] in (0o777, 0o1777)
        for mode in modes[:-1]:
            if mode == 0o700:
                break
            bad = bad or mode == 0o777
        check: Callable[[Path], object] = refusal if bad else refuse_foreign  # type: ignore[assignment]
        check(chain[-1])
