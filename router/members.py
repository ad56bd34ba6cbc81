"""Who may serve: the nodes the directory lists, and which pairs of them have shown that a hand-off works. Pure.

A pair is a prefilling and a decoding worker of one model. It gets traffic only after a probe, a real hand-off, and loses
it when a call to one of its nodes fails, until another probe succeeds. Its states::

    NEW ── probe ok ──▶ READY ── a call failed ──▶ SUSPECT ── probe ok ──▶ READY
     └─ probe failed ─▶ FAILED ─ probe ok ─▶ READY    └─ probe failed ─▶ SUSPECT
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.errors import FingerprintMismatchError, KvferryError, LayoutMismatchError
from kvferry.handoff import HandoffReport
from kvferry.keys import fingerprint_differences
from kvferry.layout import differences, render_differences
from kvferry.node import NodeInfo, WorkerInfo
from kvferry.types import NodeAddress, NodeId

__all__ = ["Incompatible", "Member", "Membership", "Pair", "PairState", "PairStatus"]

_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 5.0
# A model is known this long after its last worker went: longer than workers take to come back.
_REMEMBERED_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Member:
    """A node whose worker is attached."""

    address: NodeAddress
    control: str
    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class Pair:
    """Two members, or one in both places, that can serve a request together."""

    prefill: Member
    decode: Member

    @property
    def model(self) -> str:
        return self.decode.worker.model

    @property
    def context(self) -> int:
        return min(self.prefill.worker.context, self.decode.worker.context)

    def __str__(self) -> str:
        return f"{self.prefill.address} → {self.decode.address}"


@dataclass(frozen=True, slots=True)
class Incompatible:
    """Two members of one model name that cannot serve together, and why."""

    prefill: Member
    decode: Member
    error: KvferryError


class PairState(Enum):
    NEW = "new"
    READY = "ready"
    FAILED = "failed"
    SUSPECT = "suspect"


class _Event(Enum):
    PROBE_OK = "probe_ok"
    PROBE_FAILED = "probe_failed"
    CALL_FAILED = "call_failed"


_TRANSITIONS: dict[tuple[PairState, _Event], PairState] = {
    (PairState.NEW, _Event.PROBE_OK): PairState.READY,
    (PairState.NEW, _Event.PROBE_FAILED): PairState.FAILED,
    (PairState.NEW, _Event.CALL_FAILED): PairState.NEW,
    (PairState.READY, _Event.PROBE_OK): PairState.READY,
    (PairState.READY, _Event.PROBE_FAILED): PairState.SUSPECT,
    (PairState.READY, _Event.CALL_FAILED): PairState.SUSPECT,
    (PairState.FAILED, _Event.PROBE_OK): PairState.READY,
    (PairState.FAILED, _Event.PROBE_FAILED): PairState.FAILED,
    (PairState.FAILED, _Event.CALL_FAILED): PairState.FAILED,
    (PairState.SUSPECT, _Event.PROBE_OK): PairState.READY,
    (PairState.SUSPECT, _Event.PROBE_FAILED): PairState.SUSPECT,
    (PairState.SUSPECT, _Event.CALL_FAILED): PairState.SUSPECT,
}


@dataclass(frozen=True, slots=True)
class PairStatus:
    """One pair as it stands. ``report``: of the last probe that succeeded; ``error``: why it is not ready."""

    pair: Pair
    state: PairState
    report: HandoffReport | None
    error: KvferryError | None


@dataclass(slots=True)
class _Entry:
    state: PairState = PairState.NEW
    report: HandoffReport | None = None
    error: KvferryError | None = None
    probing: bool = False
    failures: int = 0
    next_probe: float = 0.0

    def move(self, event: _Event) -> None:
        self.state = _TRANSITIONS[self.state, event]


@dataclass(slots=True)
class _Model:
    worker: WorkerInfo
    seen: float
    served: bool = False


class Membership:
    """The router's picture of the cluster, fed with listings, probes and failed calls."""

    def __init__(self) -> None:
        self._nodes: tuple[NodeInfo, ...] = ()
        self._first_seen: dict[NodeAddress, int] = {}
        self._seen = 0
        self._pairs: dict[Pair, _Entry] = {}
        self._incompatible: tuple[Incompatible, ...] = ()
        self._models: dict[str, _Model] = {}

    def observe(self, listing: Sequence[NodeInfo], now: float) -> None:
        """Take the directory's present listing. Pairs that are still there keep their state."""
        self._first_seen = {node.address: self._arrival(node.address) for node in listing}
        self._nodes = self._newest_lives(listing)
        members = [Member(node.address, node.control, node.worker) for node in self._nodes if node.worker is not None]
        pairs: dict[Pair, _Entry] = {}
        incompatible = []
        for prefill, decode in _matches(members):
            error = _incompatibility(prefill, decode)
            if error is not None:
                incompatible.append(Incompatible(prefill, decode, error))
            else:
                pair = Pair(prefill, decode)
                pairs[pair] = self._pairs.get(pair) or _Entry()
        self._pairs = pairs
        self._incompatible = tuple(incompatible)
        self._remember([member.worker for member in members], now)

    def take_due(self, now: float, limit: int) -> list[Pair]:
        """At most ``limit`` pairs that are to be probed now; each is being probed from here until :meth:`probed`."""
        running = sum(entry.probing for entry in self._pairs.values())
        due = [
            (entry.next_probe, pair)
            for pair, entry in self._pairs.items()
            if entry.state is not PairState.READY and not entry.probing and entry.next_probe <= now
        ]
        taken = [pair for _, pair in sorted(due, key=lambda item: item[0])[: max(limit - running, 0)]]
        for pair in taken:
            self._pairs[pair].probing = True
        return taken

    def probed(self, pair: Pair, result: HandoffReport | KvferryError, now: float) -> bool:
        """A probe ended; whether that is news. One of a pair that is gone by now changes nothing."""
        entry = self._pairs.get(pair)
        if entry is None:
            return False
        entry.probing = False
        if isinstance(result, HandoffReport):
            entry.move(_Event.PROBE_OK)
            entry.report, entry.error, entry.failures = result, None, 0
            self._models[pair.model].served = True
            return True
        news = entry.error is None or str(entry.error) != str(result)
        entry.move(_Event.PROBE_FAILED)
        entry.error = result
        entry.next_probe = now + min(_LONGEST_RETRY_SECONDS, _FIRST_RETRY_SECONDS * 2**entry.failures)
        entry.failures = min(entry.failures + 1, 10)
        return news

    def call_failed(self, address: NodeAddress, error: KvferryError, now: float) -> None:
        """A call to this life of a node failed: every pair it is in must prove itself again."""
        for pair, entry in self._pairs.items():
            if address in (pair.prefill.address, pair.decode.address):
                self._suspect(entry, error, now)

    def pair_failed(self, pair: Pair, error: KvferryError, now: float) -> None:
        """These two failed together, and it is not known which of them it was."""
        entry = self._pairs.get(pair)
        if entry is not None:
            self._suspect(entry, error, now)

    def ready(self, model: str) -> tuple[Pair, ...]:
        return tuple(pair for pair, entry in self._pairs.items() if entry.state is PairState.READY and pair.model == model)

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The newest life of each listed node."""
        return self._nodes

    def statuses(self) -> tuple[PairStatus, ...]:
        return tuple(PairStatus(pair, entry.state, entry.report, entry.error) for pair, entry in self._pairs.items())

    def incompatible(self) -> tuple[Incompatible, ...]:
        return self._incompatible

    def is_ready(self) -> bool:
        """A pair serves, and none is untested or known not to work. A suspect one is not counted: it was live and left."""
        states = [entry.state for entry in self._pairs.values()]
        return PairState.READY in states and PairState.NEW not in states and PairState.FAILED not in states

    def models(self) -> tuple[str, ...]:
        """Names of the models that are announced, or were until lately."""
        return tuple(sorted(self._models))

    def worker(self, model: str) -> WorkerInfo | None:
        """A worker of the model, with the smallest context of all its workers; None for a model nobody serves."""
        known = self._models.get(model)
        return known.worker if known is not None else None

    def has_served(self, model: str) -> bool:
        """Whether a pair of this model was ready lately; such a model is waited for when its workers are away."""
        return model in self._models and self._models[model].served

    def check_invariants(self) -> None:
        """Raises AssertionError where the picture contradicts itself; for tests."""
        lives = {node.address for node in self._nodes}
        if len({address.node for address in lives}) != len(lives):
            raise AssertionError("two lives of one node count as present")
        for pair, entry in self._pairs.items():
            if not {pair.prefill.address, pair.decode.address} <= lives:
                raise AssertionError(f"{pair} has a node that is not listed")
            if entry.state is PairState.READY and (entry.report is None or entry.error is not None):
                raise AssertionError(f"{pair} is ready without a probe")
            if _incompatibility(pair.prefill, pair.decode) is not None:
                raise AssertionError(f"{pair} is incompatible")

    def _suspect(self, entry: _Entry, error: KvferryError, now: float) -> None:
        if entry.state is PairState.READY:
            entry.error = error
            entry.next_probe = now
            entry.failures = 0
        entry.move(_Event.CALL_FAILED)

    def _remember(self, workers: Sequence[WorkerInfo], now: float) -> None:
        present: dict[str, WorkerInfo] = {}
        for worker in workers:
            if worker.model not in present or worker.context < present[worker.model].context:
                present[worker.model] = worker
        for name, worker in present.items():
            known = self._models.setdefault(name, _Model(worker, now))
            known.worker, known.seen = worker, now
        self._models = {name: model for name, model in self._models.items() if now - model.seen <= _REMEMBERED_SECONDS}

    def _arrival(self, address: NodeAddress) -> int:
        if address in self._first_seen:
            return self._first_seen[address]
        self._seen += 1
        return self._seen

    def _newest_lives(self, listing: Iterable[NodeInfo]) -> tuple[NodeInfo, ...]:
        """Drop lives of a node that were there before another of its lives: their entries have just not expired yet."""
        newest: dict[NodeId, NodeInfo] = {}
        for node in listing:
            other = newest.get(node.address.node)
            if other is None or self._first_seen[other.address] < self._first_seen[node.address]:
                newest[node.address.node] = node
        return tuple(newest.values())


def _matches(members: Sequence[Member]) -> Iterable[tuple[Member, Member]]:
    for prefill in members:
        for decode in members:
            if prefill.worker.role.prefills and decode.worker.role.decodes and prefill.worker.model == decode.worker.model:
                yield prefill, decode


def _incompatibility(prefill: Member, decode: Member) -> KvferryError | None:
    """Why pages of one cannot be used by the other. Block sizes may differ."""
    what = f"prefill worker {prefill.address} and decode worker {decode.address} cannot serve together"
    wrong_model = fingerprint_differences(prefill.worker.fingerprint, decode.worker.fingerprint)
    if wrong_model:
        return FingerprintMismatchError(what, why=render_differences(wrong_model), hint="Serve the same model files with both.")
    wrong_layout = differences(prefill.worker.layout, decode.worker.layout)
    if wrong_layout:
        return LayoutMismatchError(what, why=render_differences(wrong_layout), hint="Start both with the same layout.")
    return None
