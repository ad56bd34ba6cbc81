"""The values that carry one hand-off from the router to both workers and back. Pure.

Durations are seconds that remain, never wall-clock times: clocks of two machines are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvferry.errors import KvferryError
from kvferry.keys import Fingerprint
from kvferry.layout import Layout
from kvferry.types import BlockId, Epoch, GrantId, NodeAddress, Path, RequestId

__all__ = ["DataEndpoint", "Grant", "HandoffOutcome", "HandoffRecord", "HandoffReport", "PagesReady", "Ticket"]


@dataclass(frozen=True, slots=True)
class DataEndpoint:
    """Where a daemon takes pages from its peers.

    host: id of the machine (equal on two daemons that may share memory); unix: socket path on that machine;
    tcp: "host:port" for everybody else.
    """

    host: str
    unix: str
    tcp: str


@dataclass(frozen=True, slots=True)
class Grant:
    """A decode daemon's time-bound right for one peer to write one request's prompt into named blocks.

    blocks hold prompt tokens in order; the first ``cached_tokens`` are there already and must not be written; the writer
    owes all layers of tokens [cached_tokens, tokens).
    """

    grant: GrantId
    epoch: Epoch
    request: RequestId
    blocks: tuple[BlockId, ...]
    tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the router carries from the decode side to the prefill side, so that they find each other."""

    grant: Grant
    target: NodeAddress
    endpoint: DataEndpoint
    layout: Layout
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """What one finished hand-off was: who to whom, by which path, how much, how fast.

    transfer_seconds: time in which bytes were moving; tail_seconds: from the last layer computed to the last ack, which is
    what decode waited for.
    """

    request: RequestId
    source: NodeAddress
    target: NodeAddress
    path: Path
    tokens: int
    bytes: int
    pages: int
    transfer_seconds: float
    tail_seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """0 when nothing had to move."""
        return self.bytes / self.transfer_seconds / 1e9 if self.transfer_seconds > 0 else 0.0


class HandoffOutcome(Enum):
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class HandoffRecord:
    """One ended hand-off as its sending daemon saw it; ``report`` counts what had moved when it ended."""

    report: HandoffReport
    outcome: HandoffOutcome
    error: KvferryError | None
    age_seconds: float


@dataclass(frozen=True, slots=True)
class PagesReady:
    """Layers [first_layer, first_layer + layers) of tokens [first_token, first_token + tokens) are written at the source."""

    first_layer: int
    layers: int
    first_token: int
    tokens: int
