"""The requests of the control API, as values. What each RPC does stands in ``proto/*.proto``. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.generation import SamplingParams, Token
from kvferry.handoff import HandoffReport, PagesReady, Ticket
from kvferry.keys import BlockKey, Namespace
from kvferry.layout import Layout
from kvferry.node import NodeInfo
from kvferry.types import BlockId, Epoch, GrantId, NodeAddress, OwnerId, RequestId

__all__ = [
    "Acquire",
    "Acquired",
    "Announce",
    "Attached",
    "AwaitGrant",
    "DecodeWork",
    "Empty",
    "Extend",
    "OpenGrant",
    "PrefillOutput",
    "PrefillWork",
    "PushMessage",
    "PushOpen",
    "RevokeGrant",
    "Seal",
]


@dataclass(frozen=True, slots=True)
class Empty:
    """A message that says nothing but that it came."""


@dataclass(frozen=True, slots=True)
class OpenGrant:
    """``keys``: block keys of the prompt's full blocks in the granting daemon's block size."""

    request: RequestId
    tokens: int
    keys: tuple[BlockKey, ...]
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class RevokeGrant:
    grant: GrantId
    epoch: Epoch
    why: str


@dataclass(frozen=True, slots=True)
class Attached:
    """The pool a worker got: ``layout.blocks`` blocks at the start of an arena of ``arena_bytes``."""

    address: NodeAddress
    layout: Layout
    arena_bytes: int


@dataclass(frozen=True, slots=True)
class Acquire:
    """Hold ``blocks`` blocks in all for ``owner``, of which the longest stored prefix of ``keys`` is shared."""

    owner: OwnerId
    keys: tuple[BlockKey, ...]
    blocks: int


@dataclass(frozen=True, slots=True)
class Acquired:
    """``blocks`` in token order; the first ``cached_blocks`` are written already and must not be written again."""

    blocks: tuple[BlockId, ...]
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class Extend:
    owner: OwnerId
    blocks: int


@dataclass(frozen=True, slots=True)
class Seal:
    """Blocks of ``owner`` that are completely written, each with its key."""

    owner: OwnerId
    blocks: tuple[BlockId, ...]
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class AwaitGrant:
    grant: GrantId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PushOpen:
    """``owner`` holds the source blocks in the sending daemon's pool."""

    owner: OwnerId
    ticket: Ticket


PushMessage = PushOpen | PagesReady


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """``ticket`` None: nobody will decode."""

    request: RequestId
    namespace: Namespace
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    ticket: Ticket | None


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """First the token, then the report."""

    output: Token | HandoffReport
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """``token_ids``: the prompt, then what was generated so far (the token from prefill)."""

    request: RequestId
    namespace: Namespace
    token_ids: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams
    grant: GrantId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Announce:
    node: NodeInfo
    ttl_seconds: float
