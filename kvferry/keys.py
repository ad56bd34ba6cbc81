"""Block keys and fingerprints: what makes one block's content reusable for another request. Pure.

A block key is a hash chain, ``key(i) = H(key(i-1), token ids of block i, extra keys)``, whose root binds namespace,
fingerprint and block size. A key therefore names the whole prefix up to its block, and a key of one namespace or model
never equals one of another (invariant I8).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import NewType

from kvferry.layout import FieldDifference

__all__ = ["BlockKey", "Fingerprint", "Namespace", "block_keys", "fingerprint_differences"]

Namespace = NewType("Namespace", str)
"""Tenant salt. The empty string is the namespace of requests that name none."""

BlockKey = NewType("BlockKey", bytes)
"""16 bytes. Made by :func:`block_keys` only."""

_DIGEST_BYTES = 16  # 128 bits: a collision among 2^40 stored blocks has odds below 2^-48


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must agree for KV computed by one worker to be attended to by another.

    model: architecture name; revision: digest of configuration and weights; dtype: of the computation;
    quantization: scheme or "none"; rope: canonical JSON of the rotary parameters; adapter: LoRA or "none".
    """

    model: str
    revision: str
    dtype: str
    quantization: str = "none"
    rope: str = ""
    adapter: str = "none"

    def digest(self) -> str:
        """16 hex digits over all fields."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Fingerprint:
        """Parse what :meth:`to_json` wrote. Raises ValueError on anything else."""
        raw = json.loads(text)
        names = {f.name for f in fields(Fingerprint)}
        if not isinstance(raw, dict) or set(raw) != names or not all(isinstance(v, str) for v in raw.values()):
            raise ValueError(f"a fingerprint has exactly the string fields {sorted(names)}")
        return Fingerprint(**raw)


def fingerprint_differences(ours: Fingerprint, theirs: Fingerprint) -> list[FieldDifference]:
    """Field by field, for a human."""
    return [
        FieldDifference(f.name, getattr(ours, f.name), getattr(theirs, f.name))
        for f in fields(Fingerprint)
        if getattr(ours, f.name) != getattr(theirs, f.name)
    ]


def block_keys(
    namespace: Namespace,
    fingerprint: Fingerprint,
    block_tokens: int,
    token_ids: Sequence[int],
    extra_keys: Sequence[bytes] = (),
) -> list[BlockKey]:
    """Keys of the full blocks of ``token_ids``, first block first; a trailing part of a block has none.

    Every field is length-prefixed before it is hashed, so that no two different inputs give the same bytes.
    """
    parent = _hash(namespace.encode(), fingerprint.to_json().encode(), struct.pack("<I", block_tokens), *extra_keys)
    keys = []
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        parent = _hash(parent, struct.pack(f"<{block_tokens}I", *token_ids[start : start + block_tokens]))
        keys.append(BlockKey(parent))
    return keys


def _hash(*parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(struct.pack("<I", len(part)))
        state.update(part)
    return state.digest()
