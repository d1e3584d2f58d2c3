"""Signed stores from end to end: the commands, ``ensure_warm``, and what torch never gets to see."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from places import Place
from processes import Ended, Template
from training import warm_and_train

from compilecache.errors import UntrustedArtifact
from compilecache.report import Report

pytestmark = pytest.mark.slow


def published(store: Path) -> set[Path]:
    """What lies in a store, without the claims of those who compiled."""
    return {path for path in store.rglob("*") if path.is_file() and "claims" not in path.parts}


@pytest.fixture
def signed(fresh: Template, warmed: Place) -> Place:
    """A warm root, a store whose records nobody signed, and the keys ``old`` and ``new``."""
    for name in ("old", "new"):
        ended = fresh.command("keygen", warmed.folder / name)
        assert ended.code == 0, ended.err
        assert ended.out.startswith("Key ")
    return warmed


def restored(fresh: Template, place: Place, *keys: str) -> Ended:
    """A restore into an empty root that trusts these keys."""
    shutil.rmtree(place.root, ignore_errors=True)
    words = [word for key in keys for word in ("--trust-key", place.folder / f"{key}.pub")]
    return fresh.command("restore", *place.words, "--json", *words)


def test_from_unsigned_to_signed_to_another_key(fresh: Template, signed: Place) -> None:
    """Refused with exit code 4; vouched for by publishing; rotated; each key sees what it signed."""
    old, new = signed.folder / "old", signed.folder / "new"
    published = fresh.command("publish", *signed.words, "--sign-key", old, "--json")
    assert len(published.json["published"]) == 3, published.err  # type: ignore[arg-type]
    assert len(list(signed.store.glob("v1/*/artifacts/*/*.sig"))) == 3
    assert restored(fresh, signed, "old").json["restored"] == 3
    ended = restored(fresh, signed, "new")
    assert ended.code == 4
    assert "is not trusted" in ended.err
    assert not list(signed.root.rglob("*.so"))
    sign = ("sign", "--store", signed.store, "--sign-key", new)
    assert fresh.command(*sign).code == 4
    done = fresh.command(*sign, "--trust-key", f"{old}.pub", "--json")
    assert (done.code, len(done.json["signed"])) == (0, 3)  # type: ignore[arg-type]
    assert restored(fresh, signed, "new").json["restored"] == 3
    again = fresh.command(*sign)
    assert again.out == "0 signed, 3 signed before, 0 passed over\n"


def test_vouching_for_what_a_store_holds(fresh: Template, signed: Place) -> None:
    """Only with --unsigned; ls, explain and pull go by the same keys, also from the environment."""
    keys = {
        "COMPILECACHE_SIGN_KEY": str(signed.folder / "old"),
        "COMPILECACHE_TRUST_KEYS": f"{signed.folder}/new.pub:{signed.folder}/old.pub",
    }
    shutil.rmtree(signed.root)
    listed = fresh.command("ls", "--store", signed.store, "--json", env=keys)
    assert listed.json["fingerprints"][0]["targets"] == 0  # type: ignore[index]
    assert listed.err.count("not trusted") == 3
    explained = fresh.command("explain", *signed.words, env=keys)
    assert explained.code == 3
    assert "not signed" in explained.out and "compilecache sign" in explained.out
    pulled = fresh.warmup("pull", *signed.words, "--trust-key", f"{signed.folder}/old.pub")
    assert (pulled.code, json.loads(pulled.out)["state"]) == (3, "cold")
    refused = fresh.command("sign", "--store", signed.store, env=keys)
    assert (refused.code, refused.out) == (4, "0 signed, 0 signed before, 3 passed over\n")
    done = fresh.command("sign", "--store", signed.store, "--unsigned", env=keys)
    assert (done.code, done.out) == (0, "3 signed, 0 signed before, 0 passed over\n")
    pulled = fresh.warmup("pull", *signed.words, "--trust-key", f"{signed.folder}/old.pub")
    assert (pulled.code, json.loads(pulled.out)["state"]) == (0, "warm")


def _warm(place: Place, strict: bool) -> Report:
    return warm_and_train(place.plan, place.root, place.store, strict=strict).report


def _warm_strictly(place: Place) -> str:
    with pytest.raises(UntrustedArtifact) as caught:
        _warm(place, strict=True)
    return str(caught.value)


def test_ensure_warm_compiles_what_nobody_trusted_signed(fresh: Template, signed: Place) -> None:
    """It is reported, nothing of the store is used, nothing unsigned is published; strict raises."""
    keys = {"COMPILECACHE_TRUST_KEYS": str(signed.folder / "old.pub")}
    before = published(signed.store)
    shutil.rmtree(signed.root)
    assert "not signed" in fresh.call(_warm_strictly, signed, env=keys)
    assert not list(signed.root.rglob("*.so"))
    report = fresh.call(_warm, signed, False, env=keys)
    assert (report.count("compiled"), report.restored_files) == (3, 0)
    assert sum("not signed" in text for text in report.gave_up) == 3
    assert sum("no key to sign with" in text for text in report.gave_up) == 3
    assert published(signed.store) == before
    keys["COMPILECACHE_SIGN_KEY"] = str(signed.folder / "old")
    again = fresh.call(_warm, signed, False, env=keys)
    assert (again.count("local"), again.gave_up) == (3, ())
    del keys["COMPILECACHE_SIGN_KEY"]
    shutil.rmtree(signed.root)
    last = fresh.call(_warm, signed, True, env=keys)
    assert last.count("restored") == 3


def test_keys_that_cannot_be_used(fresh: Template, signed: Place) -> None:
    """One error, the option or file named; usage is 2, a key that others can read 4."""
    bad = {
        ("restore", *signed.words, "--trust-key", "absent.pub"): (2, "absent.pub"),
        ("restore", *signed.words, "--trust-key", signed.folder / "old"): (2, "FILE.pub to trust"),
        ("keygen", signed.folder / "old"): (2, "never overwritten"),
        ("sign", "--store", signed.store): (2, "--sign-key"),
        ("sign", "--store", "none"): (2, "--store none"),
    }
    Path(signed.folder / "new").chmod(0o644)
    bad["publish", *signed.words, "--sign-key", signed.folder / "new"] = (4, "chmod 600")
    for words, (code, text) in bad.items():
        ended = fresh.command(*words)
        assert (ended.code, "Traceback" in ended.err) == (code, False), ended.err
        assert text in ended.err
