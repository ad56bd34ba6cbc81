"""The cluster as JSON: what /ready answers and what the admin page shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvferry.errors import KvferryError
from kvferry.handoff import HandoffRecord
from kvferry.node import Holding, NodeStatus, WorkerInfo
from kvferry.router.members import Membership, PairState, PairStatus
from kvferry.router.probe import PROBE_PREFIX
from kvferry.router.watch import Answer
from kvferry.types import NodeAddress, PoolCounts, Role

__all__ = ["readiness", "state"]

_HANDOFFS = 40


def readiness(members: Membership, directory_error: KvferryError | None) -> dict[str, Any]:
    """``ready``, and per pair what it proved or lacks."""
    pairs = [_pair(status) for status in members.statuses()]
    why = None
    if not members.is_ready():
        untested = sum(pair["state"] == PairState.NEW.value for pair in pairs)
        failed = sum(pair["state"] == PairState.FAILED.value for pair in pairs)
        why = (
            f"{untested} pairs are being tried and {failed} do not work"
            if untested or failed
            else "no pair of a prefill and a decode worker is there"
            if not pairs
            else "no pair works at present"
        )
    return {
        "ready": members.is_ready(),
        "why": why,
        "pairs": pairs,
        "incompatible": _incompatible(members),
        "directory_error": _text(directory_error),
    }


def state(
    members: Membership,
    answers: Sequence[Answer],
    load: Callable[[NodeAddress], int],
    requests_running: int,
    directory_error: KvferryError | None,
) -> dict[str, Any]:
    """All that the page shows."""
    statuses = members.statuses()
    ready = {
        address
        for status in statuses
        if status.state is PairState.READY
        for address in (status.pair.prefill.address, status.pair.decode.address)
    }
    unpaired = {address for entry in members.incompatible() for address in (entry.prefill.address, entry.decode.address)} - {
        address for status in statuses for address in (status.pair.prefill.address, status.pair.decode.address)
    }
    nodes = []
    for answer in sorted(answers, key=_place):
        address = answer.node.address
        standing = "ready" if address in ready else "incompatible" if address in unpaired else "not ready"
        nodes.append(_node(answer, standing, load(address)))
    return {
        "requests_running": requests_running,
        "nodes": nodes,
        "handoffs": _handoffs(answer.status for answer in answers),
        **readiness(members, directory_error),
    }


def _place(answer: Answer) -> tuple[int, str]:
    """Prefill before decode, as the KV goes."""
    role = answer.node.worker.role if answer.node.worker else None
    return ((Role.PREFILL, Role.BOTH, Role.DECODE, None).index(role), answer.node.address.node)


def _node(answer: Answer, standing: str, load: int) -> dict[str, Any]:
    node = answer.node
    status = answer.status if isinstance(answer.status, NodeStatus) else None
    # A worker that has just attached shows in the daemon's own answer, with its sized pool, before it does in the listing.
    worker = (status.info.worker if status else None) or node.worker
    return {
        "node": node.address.node,
        "incarnation": node.address.incarnation,
        "control": node.control,
        "state": "no answer" if status is None else "no worker" if worker is None else standing,
        "error": None if status else _text(answer.status),
        "requests": load,
        "worker": _worker(worker) if worker else None,
        "pool": _pool(status.pool) if status else None,
        "holdings": [_holding(holding) for holding in status.holdings] if status else [],
    }


def _worker(worker: WorkerInfo) -> dict[str, Any]:
    layout = worker.layout
    return {
        "role": worker.role.value,
        "model": worker.model,
        "fingerprint": worker.fingerprint.digest(),
        "target": worker.target,
        "context": worker.context,
        "dtype": layout.dtype.value,
        "block_tokens": layout.block_tokens,
        "block_bytes": layout.block_bytes,
    }


def _pool(pool: PoolCounts) -> dict[str, int]:
    return {
        "total": pool.total,
        "free": pool.free,
        "cached": pool.cached,
        "owned": pool.owned,
        "leased": pool.leased,
        "quarantined": pool.quarantined,
    }


def _holding(holding: Holding) -> dict[str, Any]:
    return {
        "owner": holding.owner,
        "blocks": holding.blocks,
        "held_seconds": holding.held_seconds,
        "remaining_seconds": holding.remaining_seconds,
    }


def _pair(status: PairStatus) -> dict[str, Any]:
    report = status.report
    return {
        "prefill": str(status.pair.prefill.address),
        "decode": str(status.pair.decode.address),
        "model": status.pair.model,
        "state": status.state.value,
        "path": report.path.value if report else None,
        "probe_bytes": report.bytes if report else None,
        "error": _text(status.error),
    }


def _incompatible(members: Membership) -> list[dict[str, Any]]:
    return [
        {"prefill": str(entry.prefill.address), "decode": str(entry.decode.address), "error": str(entry.error)}
        for entry in members.incompatible()
    ]


def _handoffs(statuses: Iterable[NodeStatus | KvferryError]) -> list[dict[str, Any]]:
    records = [record for status in statuses if isinstance(status, NodeStatus) for record in status.handoffs]
    return [_handoff(record) for record in sorted(records, key=lambda record: record.age_seconds)[:_HANDOFFS]]


def _handoff(record: HandoffRecord) -> dict[str, Any]:
    report = record.report
    return {
        "request": report.request,
        "probe": report.request.startswith(PROBE_PREFIX),
        "source": str(report.source),
        "target": str(report.target),
        "path": report.path.value,
        "tokens": report.tokens,
        "bytes": report.bytes,
        "pages": report.pages,
        "transfer_seconds": report.transfer_seconds,
        "gigabytes_per_second": report.gigabytes_per_second,
        "outcome": record.outcome.value,
        "error": _text(record.error),
        "age_seconds": record.age_seconds,
    }


def _text(error: KvferryError | NodeStatus | None) -> str | None:
    return str(error) if isinstance(error, KvferryError) else None
