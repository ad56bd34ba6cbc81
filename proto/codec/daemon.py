"""Requests and answers of the daemon's services ↔ messages of daemon.proto.

Each ``read_*`` raises ValueError where a message does not make a valid value; the RPC layer turns that into a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.control import (
    Acquire,
    Acquired,
    Attached,
    AwaitGrant,
    Extend,
    OpenGrant,
    PushMessage,
    PushOpen,
    RevokeGrant,
    Seal,
)
from kvferry.handoff import HandoffOutcome, HandoffRecord, PagesReady
from kvferry.keys import BlockKey
from kvferry.node import Holding, NodeStatus
from kvferry.proto import daemon_pb2, types_pb2
from kvferry.proto.codec.shared import (
    inverse,
    read_address,
    read_blocks,
    read_error,
    read_layout,
    read_node_info,
    read_report,
    read_ticket,
    write_address,
    write_error,
    write_layout,
    write_node_info,
    write_report,
    write_ticket,
)
from kvferry.types import BlockId, Epoch, GrantId, OwnerId, PoolCounts, RequestId

__all__ = [
    "read_acquire",
    "read_acquired",
    "read_attached",
    "read_await_grant",
    "read_awaited",
    "read_extend",
    "read_extended",
    "read_open_grant",
    "read_push",
    "read_revoke_grant",
    "read_seal",
    "read_status",
    "write_acquire",
    "write_acquired",
    "write_attached",
    "write_await_grant",
    "write_awaited",
    "write_extend",
    "write_extended",
    "write_open_grant",
    "write_push",
    "write_revoke_grant",
    "write_seal",
    "write_status",
]

_OUTCOMES = {
    HandoffOutcome.COMPLETE: daemon_pb2.HANDOFF_OUTCOME_COMPLETE,
    HandoffOutcome.FAILED: daemon_pb2.HANDOFF_OUTCOME_FAILED,
}


def write_status(value: NodeStatus) -> daemon_pb2.GetStatusResponse:
    return daemon_pb2.GetStatusResponse(
        info=write_node_info(value.info),
        pool=types_pb2.PoolCounts(
            free=value.pool.free,
            owned=value.pool.owned,
            leased=value.pool.leased,
            quarantined=value.pool.quarantined,
            cached=value.pool.cached,
        ),
        holdings=[
            daemon_pb2.Holding(
                owner=holding.owner,
                blocks=holding.blocks,
                held_seconds=holding.held_seconds,
                remaining_seconds=holding.remaining_seconds,
            )
            for holding in value.holdings
        ],
        handoffs=[
            daemon_pb2.HandoffRecord(
                report=write_report(record.report),
                outcome=_OUTCOMES[record.outcome],
                error=write_error(record.error) if record.error else None,
                age_seconds=record.age_seconds,
            )
            for record in value.handoffs
        ],
    )


def read_status(message: daemon_pb2.GetStatusResponse) -> NodeStatus:
    pool = message.pool
    return NodeStatus(
        info=read_node_info(message.info),
        pool=PoolCounts(pool.free, pool.owned, pool.leased, pool.quarantined, pool.cached),
        holdings=tuple(
            Holding(
                owner=OwnerId(holding.owner),
                blocks=holding.blocks,
                held_seconds=holding.held_seconds,
                remaining_seconds=holding.remaining_seconds if holding.HasField("remaining_seconds") else None,
            )
            for holding in message.holdings
        ),
        handoffs=tuple(
            HandoffRecord(
                report=read_report(record.report),
                outcome=inverse(_OUTCOMES, record.outcome, "hand-off outcome"),
                error=read_error(record.error) if record.HasField("error") else None,
                age_seconds=record.age_seconds,
            )
            for record in message.handoffs
        ),
    )


def write_open_grant(value: OpenGrant) -> daemon_pb2.OpenGrantRequest:
    return daemon_pb2.OpenGrantRequest(
        request=value.request, tokens=value.tokens, keys=value.keys, timeout_seconds=value.timeout_seconds
    )


def read_open_grant(message: daemon_pb2.OpenGrantRequest) -> OpenGrant:
    if not message.request or message.tokens < 1 or not message.timeout_seconds > 0:
        raise ValueError("a grant is opened for a named request, at least one token and a positive time")
    return OpenGrant(RequestId(message.request), message.tokens, _keys(message.keys), message.timeout_seconds)


def write_revoke_grant(value: RevokeGrant) -> daemon_pb2.RevokeGrantRequest:
    return daemon_pb2.RevokeGrantRequest(grant=value.grant, epoch=value.epoch, why=value.why)


def read_revoke_grant(message: daemon_pb2.RevokeGrantRequest) -> RevokeGrant:
    return RevokeGrant(GrantId(message.grant), Epoch(message.epoch), message.why)


def write_attached(value: Attached) -> daemon_pb2.AttachResponse:
    return daemon_pb2.AttachResponse(
        address=write_address(value.address), layout=write_layout(value.layout), arena_bytes=value.arena_bytes
    )


def read_attached(message: daemon_pb2.AttachResponse) -> Attached:
    return Attached(read_address(message.address), read_layout(message.layout), message.arena_bytes)


def write_acquire(value: Acquire) -> daemon_pb2.AcquireRequest:
    return daemon_pb2.AcquireRequest(owner=value.owner, keys=value.keys, blocks=value.blocks)


def read_acquire(message: daemon_pb2.AcquireRequest) -> Acquire:
    return Acquire(_owner(message.owner), _keys(message.keys), message.blocks)


def write_acquired(value: Acquired) -> daemon_pb2.AcquireResponse:
    return daemon_pb2.AcquireResponse(blocks=value.blocks, cached_blocks=value.cached_blocks)


def read_acquired(message: daemon_pb2.AcquireResponse) -> Acquired:
    return Acquired(read_blocks(message.blocks), message.cached_blocks)


def write_extend(value: Extend) -> daemon_pb2.ExtendRequest:
    return daemon_pb2.ExtendRequest(owner=value.owner, blocks=value.blocks)


def read_extend(message: daemon_pb2.ExtendRequest) -> Extend:
    return Extend(_owner(message.owner), message.blocks)


def write_extended(value: tuple[BlockId, ...]) -> daemon_pb2.ExtendResponse:
    return daemon_pb2.ExtendResponse(blocks=value)


def read_extended(message: daemon_pb2.ExtendResponse) -> tuple[BlockId, ...]:
    return read_blocks(message.blocks)


def write_seal(value: Seal) -> daemon_pb2.SealRequest:
    return daemon_pb2.SealRequest(owner=value.owner, blocks=value.blocks, keys=value.keys)


def read_seal(message: daemon_pb2.SealRequest) -> Seal:
    if len(message.blocks) != len(message.keys):
        raise ValueError("each sealed block has one key")
    return Seal(_owner(message.owner), read_blocks(message.blocks), _keys(message.keys))


def write_await_grant(value: AwaitGrant) -> daemon_pb2.AwaitGrantRequest:
    return daemon_pb2.AwaitGrantRequest(grant=value.grant, epoch=value.epoch)


def read_await_grant(message: daemon_pb2.AwaitGrantRequest) -> AwaitGrant:
    return AwaitGrant(GrantId(message.grant), Epoch(message.epoch))


def write_awaited(value: tuple[BlockId, ...]) -> daemon_pb2.AwaitGrantResponse:
    return daemon_pb2.AwaitGrantResponse(blocks=value)


def read_awaited(message: daemon_pb2.AwaitGrantResponse) -> tuple[BlockId, ...]:
    return read_blocks(message.blocks)


def write_push(value: PushMessage) -> daemon_pb2.PushRequest:
    if isinstance(value, PushOpen):
        return daemon_pb2.PushRequest(open=daemon_pb2.PushOpen(owner=value.owner, ticket=write_ticket(value.ticket)))
    return daemon_pb2.PushRequest(
        pages=daemon_pb2.PushPages(
            first_layer=value.first_layer, layers=value.layers, first_token=value.first_token, tokens=value.tokens
        )
    )


def read_push(message: daemon_pb2.PushRequest) -> PushMessage:
    match message.WhichOneof("body"):
        case "open":
            return PushOpen(_owner(message.open.owner), read_ticket(message.open.ticket))
        case "pages":
            pages = message.pages
            return PagesReady(pages.first_layer, pages.layers, pages.first_token, pages.tokens)
        case _:
            raise ValueError("a push message opens a hand-off or announces pages")


def _keys(keys: Iterable[bytes]) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(key) for key in keys)


def _owner(owner: str) -> OwnerId:
    if not owner:
        raise ValueError("blocks have a named owner")
    return OwnerId(owner)
