"""Objects of a store that keys vouch for: read if a trusted one signed them, signed with one's own.

A signature lies beside its object and is over the bytes that lie there. With trusted keys nothing is
believed before its signature has been verified.
"""

from __future__ import annotations

from collections.abc import Collection

from compilecache.calls import Calls
from compilecache.errors import UntrustedArtifact
from compilecache.signing import SIGNATURE_BYTES, Keys, SignKey, signature_name


def refusal(problem: str) -> UntrustedArtifact:
    """The error for an object that nobody trusted signed."""
    return UntrustedArtifact(
        problem,
        next_step="Warm it again where the sign key is, or vouch for it with 'compilecache sign'",
    )


class Vouching:
    """One storage, and who is believed."""

    def __init__(self, calls: Calls, keys: Keys) -> None:
        self._calls = calls
        self._keys = keys

    def read(self, name: str, signers: Collection[str]) -> bytes | None:
        """An object's bytes, once a trusted key is known to have signed them; None when it is absent.

        ``signers``: ids of the keys of which there are signatures. Without trusted keys everything is
        believed. An object that no trusted key claims is not even read. Raises UntrustedArtifact.
        """
        if not self._keys.trusted:
            return self._calls.read(name)
        claimed = self._keys.named(signers)
        if not claimed:
            known = ", ".join(sorted(signers)[:5])
            raise refusal(f"signed by {known}, which is not trusted" if signers else "not signed")
        data = self._calls.read(name)
        for key in claimed:
            signature = self._calls.read(signature_name(name, key), SIGNATURE_BYTES + 1)
            if data is None or key.verifies(signature or b"", data):
                return data
        raise refusal(f"it is not what {claimed[0].id} signed")

    def sign(self, signer: SignKey, name: str, data: bytes, what: str) -> bool | None:
        """Whether the signature is new; None when something else lies, and stays, in its place."""
        place, signature = signature_name(name, signer.public), signer.sign(data)
        present = self._calls.read(place, SIGNATURE_BYTES + 1)
        if present is None:
            self._calls.create(f"signature of {what}", place, signature)
            return True if self._calls.read(place, SIGNATURE_BYTES + 1) == signature else None
        return False if present == signature else None
