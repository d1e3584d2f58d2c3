"""Signatures: who is believed, and that of anybody else's record nothing is fetched or put in place."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import FINGERPRINT, harvest, plant, sample
from stores import Place

from compilecache.artifact import ADOPTED, Record
from compilecache.budget import Budget
from compilecache.cachedir import CacheDir
from compilecache.errors import PlanError, StoreUnavailable, UnsafePath, UntrustedArtifact
from compilecache.exchange import Exchange, Restored
from compilecache.fingerprint import Fingerprint
from compilecache.signing import (
    Keys,
    SignKey,
    TrustKey,
    load_sign_key,
    load_trust_key,
    make_key,
    open_keys,
    signature_of,
)
from compilecache.storage import Blob, LocalStorage, MemoryStorage
from compilecache.store import ArtifactStore

MARK = Fingerprint({"workload": "test"})
quick = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)


class Watched(LocalStorage):
    """A directory that remembers what was read of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_names: list[str] = []

    def read(self, name: str, limit: int) -> bytes:
        """As the directory does."""
        self.read_names.append(name)
        return super().read(name, limit)

    def open(self, name: str) -> Blob:
        """As the directory does."""
        self.read_names.append(name)
        return super().open(name)


@dataclass(frozen=True)
class Scene:
    """A store, a cache root, and keys to sign and to trust with."""

    folder: Path
    keys: dict[str, SignKey]

    @property
    def artifacts(self) -> Path:
        """Where the records of the adopted directory lie."""
        return self.folder / "store/v1" / MARK.digest / "artifacts" / ADOPTED

    def names(self) -> set[str]:
        """Of the records and signatures."""
        return {path.name for path in self.artifacts.iterdir()}

    def keys_of(self, trusted: str = "", signer: str = "") -> Keys:
        """Letters name the keys, as ``open_keys`` would put them together."""
        chosen = [self.keys[letter].public for letter in dict.fromkeys(trusted + signer)]
        return Keys(tuple(chosen), self.keys[signer] if signer else None)

    def store(self, trusted: str = "", signer: str = "") -> ArtifactStore:
        """A client of the store with these keys."""
        storage = LocalStorage(self.folder / "store")
        return ArtifactStore(storage, Budget(storage.url, 5), self.keys_of(trusted, signer))

    def publish(self, content: bytes, signer: str = "", trusted: str = "") -> Record:
        """A directory of one file, published from a root of its own."""
        with tempfile.TemporaryDirectory(dir=self.folder) as root:
            cache = CacheDir(root)
            cache.prepare()
            plant(cache.root, {"ab/kernel.so": content})
            exchange = Exchange(cache, self.store(trusted, signer), MARK, [ADOPTED])
            return exchange.publish(None, ["ab/kernel.so"], None)

    def restore(self, trusted: str) -> tuple[Restored, dict[str, bytes], list[str]]:
        """What a fresh root gets, what is in it then, and what was read of the store."""
        storage = Watched(self.folder / "store")
        store = ArtifactStore(storage, Budget(storage.url, 5), self.keys_of(trusted))
        with tempfile.TemporaryDirectory(dir=self.folder) as root:
            cache = CacheDir(root)
            cache.prepare()
            done = Exchange(cache, store, MARK, [ADOPTED]).restore()
            left = {n: d for n, d in harvest(cache.root).items() if not n.endswith("lock")}
        return done, left, storage.read_names

    def refused(self, trusted: str, why: str) -> None:
        """Restoring gives this one error; no pack was opened, and nothing reached the root."""
        done, left, names = self.restore(trusted)
        (fault,) = done.faults
        assert isinstance(fault, UntrustedArtifact)
        assert why in str(fault) and str(fault).endswith("'compilecache sign'.")
        assert (done.keys, done.files, left) == ([], 0, {})
        assert [name for name in names if "/packs/" in name] == []


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SignKey]:
    """Three keys, a to c."""
    folder = tmp_path_factory.mktemp("keys")
    for letter in "abc":
        make_key(folder / letter)
    return {letter: load_sign_key(folder / letter) for letter in "abc"}


@pytest.fixture
def scene(tmp_path: Path, keys: dict[str, SignKey]) -> Scene:
    """An empty store."""
    return Scene(tmp_path, keys)


# -- who is believed ------------------------------------------------------------------------------


def test_what_a_trusted_key_signed_is_restored(scene: Scene) -> None:
    """By any of the trusted keys; the signature lies beside the record, named by its key."""
    scene.publish(b"good", signer="a")
    assert scene.names() == {"1.json", f"1.{scene.keys['a'].public.id}.sig"}
    for trusted in ("a", "ba", "ab"):
        done, left, _ = scene.restore(trusted)
        assert (done.keys, done.faults) == ([ADOPTED], [])
        assert left["ab/kernel.so"] == b"good"


def test_without_trusted_keys_signatures_do_not_matter(scene: Scene) -> None:
    """Signed or not, as before."""
    scene.publish(b"good", signer="a")
    assert scene.restore("")[0].keys == [ADOPTED]


def test_an_unsigned_record_is_refused(scene: Scene) -> None:
    """Not even the record is read."""
    scene.publish(b"whatever")
    scene.refused("a", "not signed")
    assert scene.restore("a")[2] == []


def test_a_record_of_an_unknown_key_is_refused(scene: Scene) -> None:
    """Its id is named; the record is not read."""
    scene.publish(b"whatever", signer="b")
    scene.refused("ac", f"signed by {scene.keys['b'].public.id}, which is not trusted")
    assert scene.restore("ac")[2] == []


def _alter_record(scene: Scene) -> None:
    path = scene.artifacts / "1.json"
    path.write_bytes(path.read_bytes().replace(b'"environment":null', b'"environment":{}  '))


def _alter_pack_name(scene: Scene) -> None:
    other = scene.publish(b"evil").pack
    path = scene.artifacts / "1.json"
    good = Record.parse(path.read_bytes()).pack
    assert other and good
    path.write_bytes(path.read_bytes().replace(good.sha256.encode(), other.sha256.encode()))
    for name in scene.names():
        if name.startswith("2."):
            (scene.artifacts / name).unlink()


def _rename_signature(scene: Scene) -> None:
    """Another key's signature under the trusted key's name."""
    scene.publish(b"evil", signer="b")
    a, b = (scene.keys[letter].public.id for letter in "ab")
    (scene.artifacts / f"2.{b}.sig").rename(scene.artifacts / f"1.{a}.sig")
    (scene.artifacts / "2.json").rename(scene.artifacts / "1.json")


def _empty_signature(scene: Scene) -> None:
    (scene.artifacts / f"1.{scene.keys['a'].public.id}.sig").write_bytes(b"")


def _long_signature(scene: Scene) -> None:
    path = scene.artifacts / f"1.{scene.keys['a'].public.id}.sig"
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize(
    "forge",
    [_alter_record, _alter_pack_name, _rename_signature, _empty_signature, _long_signature],
    ids=lambda forge: forge.__name__,
)
def test_a_forged_record_is_refused(scene: Scene, forge: Callable[[Scene], None]) -> None:
    """Anything but the bytes that were signed, by the key that is named."""
    scene.publish(b"good", signer="a")
    forge(scene)
    scene.refused("a", "it is not what")


def test_a_signed_record_in_another_place_is_refused(scene: Scene) -> None:
    """Copied with its signature to another generation: an old artifact cannot become the newest."""
    scene.publish(b"old", signer="a")
    scene.publish(b"new", signer="a")
    sig = f"{scene.keys['a'].public.id}.sig"
    shutil.copy(scene.artifacts / "1.json", scene.artifacts / "3.json")
    shutil.copy(scene.artifacts / f"1.{sig}", scene.artifacts / f"3.{sig}")
    done, left, _ = scene.restore("a")
    (fault,) = done.faults
    assert isinstance(fault, UntrustedArtifact)
    assert "generation 3: the record names another place" in str(fault)
    assert left["ab/kernel.so"] == b"new"


@pytest.mark.parametrize("place", ["fingerprint", "key"])
def test_a_signed_record_of_another_target_is_refused(scene: Scene, place: str) -> None:
    """Copied with its signature to another key or fingerprint."""
    scene.publish(b"good", signer="a")
    key = "adopted-else" if place == "key" else ADOPTED
    digest = FINGERPRINT if place == "fingerprint" else MARK.digest
    shutil.copytree(scene.artifacts, scene.folder / "store/v1" / digest / "artifacts" / key)
    view = scene.store("a").latest(digest, [key])
    assert (dict(view.records), view.faults) == ({}, ())
    assert view.untrusted == (f"{key}, generation 1: the record names another place",)


def test_an_older_trusted_generation_stands_in(scene: Scene) -> None:
    """The newest is not trusted: it is reported, and the one before is used."""
    scene.publish(b"good", signer="a")
    scene.publish(b"evil")
    assert "2.json" in scene.names()
    done, left, names = scene.restore("a")
    assert [type(fault) for fault in done.faults] == [UntrustedArtifact]
    assert (done.keys, left["ab/kernel.so"]) == ([ADOPTED], b"good")
    assert len([name for name in names if "/packs/" in name]) == 1
    assert scene.restore("")[1]["ab/kernel.so"] == b"evil"


def test_a_damaged_pack_of_a_signed_record_is_refused(scene: Scene) -> None:
    """The signature covers the pack's sha256, so whoever changes the pack is found out."""
    scene.publish(b"good", signer="a")
    evil = scene.publish(b"evil!").pack
    good = Record.parse((scene.artifacts / "1.json").read_bytes()).pack
    assert evil and good
    packs = scene.artifacts.parents[1] / "packs"
    shutil.copy(packs / f"{evil.sha256}.tar.zst", packs / f"{good.sha256}.tar.zst")
    done, left, _ = scene.restore("a")
    assert (done.keys, left) == ([], {})


def test_packs_themselves_are_vouched_for_by_signatures_only(scene: Scene) -> None:
    """Other bytes that unpack to the very files: harmless, and yet not what was signed."""
    pack = scene.publish(b"good", signer="a").pack
    assert pack
    path = scene.artifacts.parents[1] / "packs" / f"{pack.sha256}.tar.zst"
    path.write_bytes(path.read_bytes() + (0x184D2A50).to_bytes(4, "little") + bytes(4))
    assert scene.restore("a")[1] == {}
    assert scene.restore("")[1]["ab/kernel.so"] == b"good"


@quick
@given(st.data())
def test_any_flipped_bit_of_record_or_signature_is_refused(
    keys: dict[str, SignKey], data: st.DataObject
) -> None:
    """And the good pair is not."""
    record = data.draw(st.binary(min_size=1, max_size=300))
    signature = keys["a"].sign(record)
    assert keys["a"].public.verifies(signature, record)
    assert not keys["b"].public.verifies(signature, record)
    flipped = [bytearray(record), bytearray(signature)]
    which = data.draw(st.integers(0, 1))
    bit = data.draw(st.integers(0, 8 * len(flipped[which]) - 1))
    flipped[which][bit // 8] ^= 1 << bit % 8
    assert not keys["a"].public.verifies(bytes(flipped[1]), bytes(flipped[0]))


@quick
@given(st.text(max_size=40) | st.from_regex(r"[0-9]{1,3}\.[0-9a-f]{14,18}\.sig", fullmatch=True))
def test_only_names_of_signatures_are_taken_for_them(name: str) -> None:
    """A generation, sixteen hex digits, and nothing else."""
    read = signature_of(name)
    assert read is None or name == f"{read[0]}.{read[1]}.sig"


def test_a_record_that_promises_more_than_the_disk_has_room_for(scene: Scene) -> None:
    """Said before a byte is fetched, signed or not."""
    scene.publish(b"good")
    path = scene.artifacts / "1.json"
    path.write_bytes(path.read_bytes().replace(b'"size":4,', b'"size":1125899906842624,'))
    done, left, names = scene.restore("")
    (fault,) = done.faults
    assert isinstance(fault, UnsafePath)
    assert "unpacks to 1073741824" in str(fault)
    assert left == {}
    assert [name for name in names if "/packs/" in name] == []


# -- who signs ------------------------------------------------------------------------------------


def test_who_signs_leans_on_nothing_unsigned(scene: Scene) -> None:
    """The unsigned record of the same files is believed only once these were made here.

    xxh3 is no cryptographic digest: a pack that claims to hold a file of the same digest may hold
    another. So packs of unsigned records are never named in a signed one.
    """
    unsigned = scene.publish(b"same")
    path = scene.artifacts / "1.json"
    fake = path.read_bytes().replace(unsigned.pack.sha256.encode(), b"e" * 64)  # type: ignore[union-attr]
    path.write_bytes(fake)
    signed = scene.publish(b"same", signer="a")
    assert signed.generation == 2
    assert signed.pack is not None and signed.pack.sha256 != "e" * 64
    assert scene.restore("a")[1]["ab/kernel.so"] == b"same"


def test_the_same_content_is_signed_where_it_is(scene: Scene) -> None:
    """Publishing what is there already adds the signature, also that of a second key."""
    scene.publish(b"same")
    scene.publish(b"same", signer="a")
    scene.publish(b"same", signer="b")
    a, b = (scene.keys[letter].public.id for letter in "ab")
    assert scene.names() == {"1.json", f"1.{a}.sig", f"1.{b}.sig"}
    assert scene.restore("a")[0].keys == scene.restore("b")[0].keys == [ADOPTED]


def test_a_spoilt_signature_costs_a_generation(scene: Scene) -> None:
    """Nothing is overwritten: what lies in place of the signature stays, the next one is used."""
    scene.publish(b"same")
    spoilt = scene.artifacts / f"1.{scene.keys['a'].public.id}.sig"
    spoilt.write_bytes(b"x" * 64)
    assert scene.publish(b"same", signer="a").generation == 2
    assert spoilt.read_bytes() == b"x" * 64
    assert scene.restore("a")[0].keys == [ADOPTED]


def test_a_publisher_that_died_before_it_signed(scene: Scene) -> None:
    """The same command again signs the record that it left behind."""
    scene.publish(b"same", signer="a")
    (scene.artifacts / f"1.{scene.keys['a'].public.id}.sig").unlink()
    scene.refused("a", "not signed")
    assert scene.publish(b"same", signer="a").generation == 1
    assert scene.restore("a")[0].keys == [ADOPTED]


def test_who_trusts_and_cannot_sign_publishes_nothing(scene: Scene) -> None:
    """Nobody would believe it; every start would add a record."""
    with pytest.raises(UntrustedArtifact, match="no key to sign with"):
        scene.publish(b"mine", trusted="a")
    assert not scene.artifacts.exists()
    assert not list((scene.folder / "store").rglob("*.zst"))


def test_rotation(scene: Scene) -> None:
    """The new key signs what the old one had signed, and nothing else; then the old one can go."""
    scene.publish(b"good", signer="a")
    scene.publish(b"evil")
    done = scene.store("a", "b").sign(MARK.digest)
    assert (done.keys, done.known) == ((ADOPTED,), 0)
    assert done.refused == ("adopted, generation 2: not signed",)
    assert scene.restore("b")[1]["ab/kernel.so"] == b"good"
    assert scene.restore("a")[1]["ab/kernel.so"] == b"good"
    again = scene.store("a", "b").sign(MARK.digest)
    assert (again.keys, again.known) == ((), 1)


def test_signing_what_was_never_signed(scene: Scene) -> None:
    """Only when asked for in so many words."""
    scene.publish(b"old")
    done = scene.store(signer="a").sign(MARK.digest)
    assert (done.keys, len(done.refused)) == ((), 1)
    assert scene.store(signer="a").sign(MARK.digest, unsigned=True).keys == (ADOPTED,)
    assert scene.restore("a")[1]["ab/kernel.so"] == b"old"
    with pytest.raises(ValueError, match="sign_key"):
        scene.store("a").sign(MARK.digest)


def test_every_kind_of_store_keeps_signatures(
    place: Place, keys: dict[str, SignKey], tmp_path: Path
) -> None:
    """A directory, memory, and S3: signed, found, refused for another key."""
    for letter in "ab":
        (tmp_path / letter).write_bytes(base64.b64encode(keys[letter].raw))
        (tmp_path / letter).chmod(0o600)
        (tmp_path / f"{letter}.pub").write_bytes(base64.b64encode(keys[letter].public.raw))
    record, pack = sample(tmp_path)

    def opened(**more: object) -> ArtifactStore:
        return ArtifactStore.open(place.url, storage_options=place.options, **more)  # type: ignore[arg-type]

    assert opened(sign_key=tmp_path / "a").publish(record, pack) == record
    good = opened(trust_keys=[tmp_path / "b.pub", tmp_path / "a.pub"]).latest(FINGERPRINT)
    assert (dict(good.records), good.untrusted) == ({ADOPTED: record}, ())
    bad = opened(trust_keys=[tmp_path / "b.pub"]).latest(FINGERPRINT)
    assert (dict(bad.records), len(bad.untrusted)) == ({}, 1)


class Careless(MemoryStorage):
    """s3fs#973: ignores "only if absent"."""

    def create(self, name: str, data: bytes) -> bool:
        """Overwrites."""
        with self._lock:
            self._files.pipe_file(self._path(name), data)
        return True


def test_a_careless_store_does_no_harm(keys: dict[str, SignKey], tmp_path: Path) -> None:
    """Equal keys write equal signatures, so overwriting one changes nothing."""
    storage = Careless(tmp_path.name)
    signing = Keys((keys["a"].public,), keys["a"])
    store = ArtifactStore(storage, Budget(storage.url, 5), signing)
    record, pack = sample(tmp_path)
    assert store.publish(record, pack) == store.publish(record, pack) == record
    assert dict(store.latest(FINGERPRINT).records) == {ADOPTED: record}


# -- key files ------------------------------------------------------------------------------------


def test_a_new_key(tmp_path: Path) -> None:
    """Private 0600, public for everybody; never overwritten, not even one half."""
    made = make_key(tmp_path / "k")
    assert load_sign_key(tmp_path / "k").public == load_trust_key(tmp_path / "k.pub") == made
    assert oct((tmp_path / "k").stat().st_mode)[-3:] == "600"
    assert oct((tmp_path / "k.pub").stat().st_mode)[-3:] == "644"
    assert "raw=" not in repr(load_sign_key(tmp_path / "k")).replace("TrustKey(raw=", "")
    before = harvest(tmp_path)
    with pytest.raises(PlanError, match="never overwritten"):
        make_key(tmp_path / "k")
    (tmp_path / "k").unlink()
    with pytest.raises(PlanError, match=r"k\.pub' is there already"):
        make_key(tmp_path / "k")
    assert harvest(tmp_path) == {"k.pub": before["k.pub"]}
    with pytest.raises(PlanError, match="cannot be written"):
        make_key(tmp_path / "nowhere" / "k")


def test_base64_keys(tmp_path: Path, keys: dict[str, SignKey]) -> None:
    """32 bytes as text, wherever the lines break."""
    (tmp_path / "k").write_bytes(base64.encodebytes(keys["a"].raw))
    (tmp_path / "k").chmod(0o400)
    (tmp_path / "p").write_bytes(base64.b64encode(keys["a"].public.raw))
    assert load_sign_key(tmp_path / "k") == keys["a"]
    assert load_trust_key(tmp_path / "p") == keys["a"].public


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs the program openssl")
def test_openssl_agrees(tmp_path: Path, scene: Scene) -> None:
    """Keys of openssl are keys; a record and its signature can be checked without this library."""
    run = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / "k"]
    subprocess.run(run, check=True, capture_output=True)
    (tmp_path / "k").chmod(0o600)
    key = load_sign_key(tmp_path / "k")
    make_key(tmp_path / "other")
    scene.keys["o"] = load_sign_key(tmp_path / "other")
    scene.publish(b"good", signer="o")
    verify = [
        "openssl", "pkeyutl", "-verify", "-pubin", "-inkey", tmp_path / "other.pub", "-rawin",
        "-in", scene.artifacts / "1.json",
        "-sigfile", scene.artifacts / f"1.{scene.keys.pop('o').public.id}.sig",
    ]  # fmt: skip
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    if "rawin" in done.stderr:
        pytest.skip("this openssl is too old for Ed25519 on the command line")
    assert done.returncode == 0, done.stderr
    assert len(key.raw) == 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o610])
def test_a_private_key_that_others_can_read(tmp_path: Path, mode: int) -> None:
    """Whoever has read it can sign."""
    make_key(tmp_path / "k")
    (tmp_path / "k").chmod(mode)
    with pytest.raises(UntrustedArtifact, match=r"chmod (600|go-w)"):
        load_sign_key(tmp_path / "k")


def test_a_trust_key_that_others_can_write(tmp_path: Path) -> None:
    """Whoever writes it decides who is trusted."""
    make_key(tmp_path / "k")
    (tmp_path / "k.pub").chmod(0o666)
    with pytest.raises(UntrustedArtifact, match=r"written by everybody.*chmod go-w"):
        load_trust_key(tmp_path / "k.pub")


@pytest.mark.parametrize("content", [b"", b"x" * 32, b"AAAA", b"-----BEGIN X-----\n", b"\xff\x00"])
def test_what_is_no_key(tmp_path: Path, content: bytes) -> None:
    """The file, the option and what to name instead."""
    (tmp_path / "k").write_bytes(content)
    (tmp_path / "k").chmod(0o600)
    for load, field in ((load_sign_key, "--sign-key"), (load_trust_key, "--trust-key")):
        with pytest.raises(PlanError, match="Ed25519 key") as caught:
            load(tmp_path / "k")
        assert caught.value.field == field
    for bad in (tmp_path, tmp_path / "absent"):
        with pytest.raises(PlanError):
            load_trust_key(bad)


def test_halves_are_not_mixed_up(tmp_path: Path) -> None:
    """A private key is not taken for one to trust, nor the other way round."""
    make_key(tmp_path / "k")
    with pytest.raises(PlanError, match="no public"):
        load_trust_key(tmp_path / "k")
    (tmp_path / "k.pub").chmod(0o600)
    with pytest.raises(PlanError, match="no private"):
        load_sign_key(tmp_path / "k.pub")


def test_the_environment_names_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is named in the call counts instead; a file that is missing is never passed over."""
    a, b = make_key(tmp_path / "a"), make_key(tmp_path / "b")
    assert open_keys() == Keys()
    monkeypatch.setenv("COMPILECACHE_TRUST_KEYS", f"{tmp_path}/a.pub{os.pathsep}{tmp_path}/b.pub")
    assert open_keys() == Keys((a, b))
    assert open_keys(trust_keys=[tmp_path / "b.pub"]) == Keys((b,))
    assert open_keys(trust_keys=[]) == Keys()
    monkeypatch.setenv("COMPILECACHE_SIGN_KEY", str(tmp_path / "b"))
    assert open_keys(trust_keys=[]) == Keys((b,), load_sign_key(tmp_path / "b"))
    monkeypatch.setenv("COMPILECACHE_TRUST_KEYS", str(tmp_path / "gone.pub"))
    with pytest.raises(PlanError, match="cannot be read"):
        ArtifactStore.open(tmp_path / "store")


def test_an_id_is_the_digest_of_the_key() -> None:
    """Sixteen hex digits."""
    assert TrustKey(bytes(32)).id == "66687aadf862bd77"


def test_without_cryptography(tmp_path: Path) -> None:
    """Nothing needs it until a key is named; then one error says what to install."""
    script = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from compilecache.errors import StoreUnavailable\n"
        "from compilecache.store import ArtifactStore\n"
        f"ArtifactStore.open({str(tmp_path)!r}).latest('ab' * 16)\n"
        "try: ArtifactStore.open('memory://x', trust_keys=['k.pub'])\n"
        "except StoreUnavailable as error: assert \"pip install 'compilecache[sign]'\" in str(error)\n"
        "else: raise SystemExit('opened')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert issubclass(StoreUnavailable, OSError)
