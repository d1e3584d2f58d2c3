"""A second S3 server: s3rver, which overwrites what it is asked to create only."""

from __future__ import annotations

from pathlib import Path

import pytest
from pods import MARK, Pod, targets, together
from store_samples import FINGERPRINT, sample
from stores import Place
from test_store import TestStoreContract as StoreContract

from compilecache.claims import Claims
from compilecache.doctor.store import check_store
from compilecache.storage import open_storage


@pytest.fixture
def place(s3rver_place: Place) -> Place:
    """Every store of this module lies on s3rver."""
    return s3rver_place


class TestOfS3rver(StoreContract):
    """The contract once more."""

    def shown(self, folders: list[str]) -> list[str]:
        """It shows no folder that holds nothing but folders: ``ls`` sees nothing, restores do."""
        return []


def test_the_probe_of_claims_finds_it(place: Place) -> None:
    """Whoever wants to claim learns that a claim would hold nobody back."""
    for _ in range(2):
        assert not Claims(place.open(), MARK.digest).exclusive()


def test_doctor_says_it(place: Place) -> None:
    """It answers, its clock is right, and it overwrites: a note with what follows; no probe stays."""
    storage = open_storage(place.url, patience=10, options=place.options)
    found = list(check_store(storage))
    assert [finding.level for finding in found] == ["ok", "ok", "note"]
    assert "overwrites" in found[-1].what
    assert "stays right" in found[-1].why
    assert storage.walk("probes") == {}


def test_everyone_compiles_and_nothing_is_lost(place: Place, tmp_path: Path) -> None:
    """Two pods that start cold at once each compile all and are told why; a third finds everything."""
    wanted = targets(3)
    pods = [Pod(tmp_path / name, place.open(), seconds=0.05) for name in "ab"]
    together(pods, wanted)
    for pod in pods:
        assert pod.compiled == [target.key for target in wanted]
        assert len(pod.alone) == 1
        assert "share=False" in pod.alone[0]
        assert pod.damaged() == []
    later = Pod(tmp_path / "c", place.open())
    later.run(wanted)
    assert (later.compiled, later.alone) == ([], [])


def test_a_later_publisher_overwrites_nothing(place: Place, tmp_path: Path) -> None:
    """What is there is found before it is written, so other content goes to the next generation."""
    first, pack = sample(tmp_path, 1)
    second, other = sample(tmp_path, 2)
    assert place.open().publish(first, pack) == first
    assert place.open().publish(second, other).generation == 2
    assert place.open().publish(first, pack) == first
    assert place.open().latest(FINGERPRINT).records["adopted"].same_content(second)
