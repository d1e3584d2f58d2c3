"""Ed25519 signatures of records: keys in files, who is believed, and who signs.

A signature is over the bytes of a record as they lie in the store. They name every pack by its
sha256, so whoever trusts the record trusts the packs. Importing this module does not import
``cryptography``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib
import os
import re
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from compilecache.errors import PlanError, StoreUnavailable, UntrustedArtifact
from compilecache.files import creating
from compilecache.ownership import refuse_foreign

RAW_BYTES: Final = 32
"""Of a key, private or public."""
SIGNATURE_BYTES: Final = 64
ID_DIGITS: Final = 16
SIGN_KEY = "COMPILECACHE_SIGN_KEY"
TRUST_KEYS = "COMPILECACHE_TRUST_KEYS"

_SIGNATURE = re.compile(rf"([1-9][0-9]{{0,9}})\.([0-9a-f]{{{ID_DIGITS}}})\.sig")


@dataclass(frozen=True, slots=True)
class TrustKey:
    """A public key: what it signed is believed."""

    raw: bytes
    """32 bytes."""

    @property
    def id(self) -> str:
        """The first 16 hex digits of the sha256 of ``raw``: how signatures name their key."""
        return hashlib.sha256(self.raw).hexdigest()[:ID_DIGITS]

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Whether this key made the signature over exactly these bytes."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, data)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SignKey:
    """A private key."""

    raw: bytes = field(repr=False)
    """32 bytes; nobody else may read them."""
    public: TrustKey
    """What others trust."""

    def sign(self, data: bytes) -> bytes:
        """64 bytes; equal data gives equal signatures."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self.raw).sign(data)


@dataclass(frozen=True, slots=True)
class Keys:
    """Who is believed, and who signs. Empty: everybody is, and nobody does."""

    trusted: tuple[TrustKey, ...] = ()
    """A record counts when one of these signed it; without any, every record counts."""
    signer: SignKey | None = None
    """Signs what is published; its public half is one of the trusted."""

    def named(self, ids: Collection[str]) -> list[TrustKey]:
        """The trusted keys among these ids."""
        return [key for key in self.trusted if key.id in ids]


NOBODY: Final = Keys()
"""Everything is believed, nothing is signed."""


def open_keys(
    sign_key: str | Path | None = None, trust_keys: Iterable[str | Path] | None = None
) -> Keys:
    """The keys in these files; None: those that the environment names.

    Who signs believes only what is signed: the signer's own public key is always trusted. Raises
    PlanError for a file that holds no key, UntrustedArtifact for one that others could have read
    (private) or written, StoreUnavailable when the library ``cryptography`` is not installed.
    """
    sign_key = sign_key or os.environ.get(SIGN_KEY)
    if trust_keys is None:
        trust_keys = filter(None, os.environ.get(TRUST_KEYS, "").split(os.pathsep))
    signer = load_sign_key(Path(sign_key)) if sign_key else None
    trusted = [load_trust_key(Path(path)) for path in trust_keys]
    if signer is not None:
        trusted.append(signer.public)
    return Keys(tuple(dict.fromkeys(trusted)), signer)


def make_key(path: Path) -> TrustKey:
    """A new key: ``path`` is the private half, mode 0600, ``path``.pub the public one.

    Raises PlanError when either is there already or cannot be written: nothing is overwritten.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    public = key.public_key().public_bytes(
        form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo
    )
    public_path = path.with_name(f"{path.name}.pub")
    _refuse_present(path, public_path)
    _write(path, private)
    _write(public_path, public)
    public_path.chmod(0o644)
    return TrustKey(key.public_key().public_bytes_raw())


def load_sign_key(path: Path) -> SignKey:
    """The private key in a file: PEM (PKCS 8), or 32 bytes in base64. Raises as ``open_keys``."""
    data = _read(path, private=True)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    raw = _raw(data)
    try:
        found = (
            Ed25519PrivateKey.from_private_bytes(raw) if raw else load_pem_private_key(data, None)
        )
    except (ValueError, TypeError, UnsupportedAlgorithm):
        found = None
    if not isinstance(found, Ed25519PrivateKey):
        raise _no_key(path, "private")
    return SignKey(found.private_bytes_raw(), TrustKey(found.public_key().public_bytes_raw()))


def load_trust_key(path: Path) -> TrustKey:
    """The public key in a file: PEM, or 32 bytes in base64. Raises as ``open_keys``."""
    data = _read(path, private=False)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    raw = _raw(data)
    try:
        found = Ed25519PublicKey.from_public_bytes(raw) if raw else load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        found = None
    if not isinstance(found, Ed25519PublicKey):
        raise _no_key(path, "public")
    return TrustKey(found.public_bytes_raw())


def signature_name(record_name: str, key: TrustKey) -> str:
    """Where a key's signature of the record at ``…/<generation>.json`` lies."""
    return f"{record_name.removesuffix('.json')}.{key.id}.sig"


def signature_of(name: str) -> tuple[int, str] | None:
    """Generation and key id of a signature's file name; None for any other name."""
    match = _SIGNATURE.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


# -- key files ------------------------------------------------------------------------------------


def _require_cryptography() -> None:
    try:
        importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError as error:
        raise StoreUnavailable(
            f"signatures need the library cryptography, which cannot be imported ({error})",
            next_step="Install it: pip install 'compilecache[sign]'",
        ) from error


def _read(path: Path, *, private: bool) -> bytes:
    """What a key file holds, once it is clear who may have written it, and read it."""
    _require_cryptography()
    try:
        status = path.stat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise PlanError(
            f"key file '{path}' cannot be read: {error.strerror}",
            next_step="Name a file that 'compilecache keygen' wrote",
            field=_option(private),
        ) from error
    refuse_foreign(path)
    if private:
        _refuse_readable(path, status)
    return data


def _refuse_readable(path: Path, status: os.stat_result) -> None:
    """A mounted secret may be root's and come through a group; a file of one's own may not."""
    forbidden = 0o077 if status.st_uid == os.geteuid() else 0o007
    if status.st_mode & forbidden:
        raise UntrustedArtifact(
            f"private key '{path}' has mode {stat.S_IMODE(status.st_mode):o}: others could sign "
            "with it",
            next_step=f"Run: chmod 600 '{path}', and make a new key if others may have read it",
        )


def _raw(data: bytes) -> bytes | None:
    """The key when the file is base64 of one; None for PEM and for whatever else."""
    try:
        raw = base64.b64decode(b"".join(data.split()), validate=True)
    except binascii.Error:
        return None
    return raw if len(raw) == RAW_BYTES else None


def _option(private: bool) -> str:
    return "--sign-key" if private else "--trust-key"


def _no_key(path: Path, half: str) -> PlanError:
    return PlanError(
        f"'{path}' holds no {half} Ed25519 key that can be read without a password",
        next_step="Name a file that 'compilecache keygen' wrote: FILE to sign, FILE.pub to trust",
        field=_option(half == "private"),
    )


def _refuse_present(*places: Path) -> None:
    for place in places:
        if os.path.lexists(place):
            raise PlanError(
                f"'{place}' is there already, and keys are never overwritten",
                next_step="Name another file",
                field="FILE",
            )


def _write(path: Path, data: bytes) -> None:
    try:
        with creating(path) as file:
            file.write(data)
    except OSError as error:
        raise PlanError(
            f"'{path}' cannot be written: {error.strerror}",
            next_step="Name a file in a folder that exists and is yours",
            field="FILE",
        ) from error
