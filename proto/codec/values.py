"""Values of the vocabulary ↔ protobuf messages.

Each ``read_*`` raises ValueError where a message does not make a valid value; the RPC layer turns that into a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from kvferry.control import (
    Acquire,
    Acquired,
    Announce,
    Attached,
    AwaitGrant,
    DecodeWork,
    Extend,
    OpenGrant,
    PrefillOutput,
    PrefillWork,
    PushMessage,
    PushOpen,
    RevokeGrant,
    Seal,
)
from kvferry.errors import KvferryError, Reason, Stage, Where, error_class
from kvferry.generation import FinishReason, SamplingParams, Token, TokenLogprob, WorkerLoad
from kvferry.handoff import DataEndpoint, Grant, HandoffOutcome, HandoffRecord, HandoffReport, PagesReady, Ticket
from kvferry.keys import BlockKey, Fingerprint, Namespace
from kvferry.layout import DType, Layout
from kvferry.node import Holding, NodeInfo, NodeStatus, WorkerInfo
from kvferry.proto import daemon_pb2, directory_pb2, types_pb2, worker_pb2
from kvferry.types import BlockId, Epoch, GrantId, Incarnation, NodeAddress, NodeId, OwnerId, Path, PoolCounts, RequestId, Role

_ROLES = {
    Role.PREFILL: types_pb2.ROLE_PREFILL,
    Role.DECODE: types_pb2.ROLE_DECODE,
    Role.BOTH: types_pb2.ROLE_BOTH,
}
_PATHS = {Path.SHM: types_pb2.PATH_SHM, Path.TCP: types_pb2.PATH_TCP}
_FINISHES = {
    None: worker_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: worker_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: worker_pb2.FINISH_REASON_LENGTH,
}
_OUTCOMES = {
    HandoffOutcome.COMPLETE: daemon_pb2.HANDOFF_OUTCOME_COMPLETE,
    HandoffOutcome.FAILED: daemon_pb2.HANDOFF_OUTCOME_FAILED,
}


K = TypeVar("K")
V = TypeVar("V")


def _inverse(table: dict[K, V], value: V, what: str) -> K:
    for key, candidate in table.items():
        if candidate == value:
            return key
    raise ValueError(f"unknown {what} {value}")


def write_address(value: NodeAddress) -> types_pb2.NodeAddress:
    return types_pb2.NodeAddress(node=value.node, incarnation=value.incarnation)


def read_address(message: types_pb2.NodeAddress) -> NodeAddress:
    if not message.node or not message.incarnation:
        raise ValueError("a node address names a node and an incarnation")
    return NodeAddress(NodeId(message.node), Incarnation(message.incarnation))


def write_endpoint(value: DataEndpoint) -> types_pb2.DataEndpoint:
    return types_pb2.DataEndpoint(host=value.host, unix=value.unix, tcp=value.tcp)


def read_endpoint(message: types_pb2.DataEndpoint) -> DataEndpoint:
    return DataEndpoint(host=message.host, unix=message.unix, tcp=message.tcp)


def write_layout(value: Layout) -> types_pb2.Layout:
    return types_pb2.Layout(
        layers=value.layers,
        tensors=value.tensors,
        heads=value.heads,
        head_dim=value.head_dim,
        dtype=value.dtype.value,
        block_tokens=value.block_tokens,
        blocks=value.blocks,
    )


def read_layout(message: types_pb2.Layout) -> Layout:
    return Layout(
        layers=message.layers,
        tensors=message.tensors,
        heads=message.heads,
        head_dim=message.head_dim,
        dtype=DType(message.dtype),
        block_tokens=message.block_tokens,
        blocks=message.blocks,
    )


def write_fingerprint(value: Fingerprint) -> types_pb2.Fingerprint:
    return types_pb2.Fingerprint(
        model=value.model,
        revision=value.revision,
        dtype=value.dtype,
        quantization=value.quantization,
        rope=value.rope,
        adapter=value.adapter,
    )


def read_fingerprint(message: types_pb2.Fingerprint) -> Fingerprint:
    return Fingerprint(
        model=message.model,
        revision=message.revision,
        dtype=message.dtype,
        quantization=message.quantization,
        rope=message.rope,
        adapter=message.adapter,
    )


def write_worker_info(value: WorkerInfo) -> types_pb2.WorkerInfo:
    return types_pb2.WorkerInfo(
        role=_ROLES[value.role],
        target=value.target,
        model=value.model,
        model_dir=value.model_dir,
        context=value.context,
        layout=write_layout(value.layout),
        fingerprint=write_fingerprint(value.fingerprint),
    )


def read_worker_info(message: types_pb2.WorkerInfo) -> WorkerInfo:
    return WorkerInfo(
        role=_inverse(_ROLES, message.role, "role"),
        target=message.target,
        model=message.model,
        model_dir=message.model_dir,
        context=message.context,
        layout=read_layout(message.layout),
        fingerprint=read_fingerprint(message.fingerprint),
    )


def write_node_info(value: NodeInfo) -> types_pb2.NodeInfo:
    return types_pb2.NodeInfo(
        address=write_address(value.address),
        control=value.control,
        endpoint=write_endpoint(value.endpoint),
        worker=write_worker_info(value.worker) if value.worker else None,
    )


def read_node_info(message: types_pb2.NodeInfo) -> NodeInfo:
    return NodeInfo(
        address=read_address(message.address),
        control=message.control,
        endpoint=read_endpoint(message.endpoint),
        worker=read_worker_info(message.worker) if message.HasField("worker") else None,
    )


def write_grant(value: Grant) -> types_pb2.Grant:
    return types_pb2.Grant(
        grant=value.grant,
        epoch=value.epoch,
        request=value.request,
        blocks=value.blocks,
        tokens=value.tokens,
        cached_tokens=value.cached_tokens,
    )


def read_grant(message: types_pb2.Grant) -> Grant:
    return Grant(
        grant=GrantId(message.grant),
        epoch=Epoch(message.epoch),
        request=RequestId(message.request),
        blocks=_blocks(message.blocks),
        tokens=message.tokens,
        cached_tokens=message.cached_tokens,
    )


def write_ticket(value: Ticket) -> types_pb2.Ticket:
    return types_pb2.Ticket(
        grant=write_grant(value.grant),
        target=write_address(value.target),
        endpoint=write_endpoint(value.endpoint),
        layout=write_layout(value.layout),
        fingerprint=write_fingerprint(value.fingerprint),
    )


def read_ticket(message: types_pb2.Ticket) -> Ticket:
    return Ticket(
        grant=read_grant(message.grant),
        target=read_address(message.target),
        endpoint=read_endpoint(message.endpoint),
        layout=read_layout(message.layout),
        fingerprint=read_fingerprint(message.fingerprint),
    )


def write_report(value: HandoffReport) -> types_pb2.HandoffReport:
    return types_pb2.HandoffReport(
        request=value.request,
        source=write_address(value.source),
        target=write_address(value.target),
        path=_PATHS[value.path],
        tokens=value.tokens,
        bytes=value.bytes,
        pages=value.pages,
        transfer_seconds=value.transfer_seconds,
        tail_seconds=value.tail_seconds,
    )


def read_report(message: types_pb2.HandoffReport) -> HandoffReport:
    return HandoffReport(
        request=RequestId(message.request),
        source=read_address(message.source),
        target=read_address(message.target),
        path=_inverse(_PATHS, message.path, "path"),
        tokens=message.tokens,
        bytes=message.bytes,
        pages=message.pages,
        transfer_seconds=message.transfer_seconds,
        tail_seconds=message.tail_seconds,
    )


def write_error(value: KvferryError) -> types_pb2.ErrorDetail:
    return types_pb2.ErrorDetail(
        reason=value.reason.value,
        what=value.what,
        stage=value.where.stage.value if value.where.stage else "",
        peer=value.where.peer or "",
        path=value.where.path.value if value.where.path else "",
        why=value.why,
        hint=value.hint,
        field=value.field or "",
    )


def read_error(message: types_pb2.ErrorDetail) -> KvferryError:
    where = Where(
        stage=Stage(message.stage) if message.stage else None,
        peer=message.peer or None,
        path=Path(message.path) if message.path else None,
    )
    leaf = error_class(Reason(message.reason))
    return leaf(message.what, where=where, why=message.why, hint=message.hint, field=message.field or None)


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
                outcome=_inverse(_OUTCOMES, record.outcome, "hand-off outcome"),
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
    return Acquired(_blocks(message.blocks), message.cached_blocks)


def write_extend(value: Extend) -> daemon_pb2.ExtendRequest:
    return daemon_pb2.ExtendRequest(owner=value.owner, blocks=value.blocks)


def read_extend(message: daemon_pb2.ExtendRequest) -> Extend:
    return Extend(_owner(message.owner), message.blocks)


def write_extended(value: tuple[BlockId, ...]) -> daemon_pb2.ExtendResponse:
    return daemon_pb2.ExtendResponse(blocks=value)


def read_extended(message: daemon_pb2.ExtendResponse) -> tuple[BlockId, ...]:
    return _blocks(message.blocks)


def write_seal(value: Seal) -> daemon_pb2.SealRequest:
    return daemon_pb2.SealRequest(owner=value.owner, blocks=value.blocks, keys=value.keys)


def read_seal(message: daemon_pb2.SealRequest) -> Seal:
    if len(message.blocks) != len(message.keys):
        raise ValueError("each sealed block has one key")
    return Seal(_owner(message.owner), _blocks(message.blocks), _keys(message.keys))


def write_await_grant(value: AwaitGrant) -> daemon_pb2.AwaitGrantRequest:
    return daemon_pb2.AwaitGrantRequest(grant=value.grant, epoch=value.epoch)


def read_await_grant(message: daemon_pb2.AwaitGrantRequest) -> AwaitGrant:
    return AwaitGrant(GrantId(message.grant), Epoch(message.epoch))


def write_awaited(value: tuple[BlockId, ...]) -> daemon_pb2.AwaitGrantResponse:
    return daemon_pb2.AwaitGrantResponse(blocks=value)


def read_awaited(message: daemon_pb2.AwaitGrantResponse) -> tuple[BlockId, ...]:
    return _blocks(message.blocks)


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


def write_sampling(value: SamplingParams) -> worker_pb2.Sampling:
    return worker_pb2.Sampling(
        temperature=value.temperature,
        top_p=value.top_p,
        top_k=value.top_k,
        seed=value.seed,
        max_tokens=value.max_tokens,
        stop_token_ids=value.stop_token_ids,
        ignore_eos=value.ignore_eos,
        top_logprobs=value.top_logprobs,
    )


def read_sampling(message: worker_pb2.Sampling) -> SamplingParams:
    if message.max_tokens < 1 or message.temperature < 0 or not 0 < message.top_p <= 1:
        raise ValueError("sampling asks for at least one token, a temperature of at least 0 and a top_p in (0, 1]")
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
    )


def write_token(value: Token) -> worker_pb2.Token:
    return worker_pb2.Token(
        token_id=value.token_id,
        logprob=value.logprob,
        top=[worker_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob) for entry in value.top],
        finish=_FINISHES[value.finish],
    )


def read_token(message: worker_pb2.Token) -> Token:
    return Token(
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple(TokenLogprob(entry.token_id, entry.logprob) for entry in message.top),
        finish=_inverse(_FINISHES, message.finish, "finish reason"),
    )


def write_prefill(value: PrefillWork) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(
        request=value.request,
        namespace=value.namespace,
        token_ids=value.token_ids,
        sampling=write_sampling(value.sampling),
        ticket=write_ticket(value.ticket) if value.ticket else None,
    )


def read_prefill(message: worker_pb2.PrefillRequest) -> PrefillWork:
    if not message.request or not message.token_ids:
        raise ValueError("a prefill has a request id and at least one token")
    return PrefillWork(
        request=RequestId(message.request),
        namespace=Namespace(message.namespace),
        token_ids=tuple(message.token_ids),
        sampling=read_sampling(message.sampling),
        ticket=read_ticket(message.ticket) if message.HasField("ticket") else None,
    )


def write_prefill_output(value: PrefillOutput) -> worker_pb2.PrefillResponse:
    if isinstance(value.output, Token):
        return worker_pb2.PrefillResponse(token=write_token(value.output), cached_tokens=value.cached_tokens)
    return worker_pb2.PrefillResponse(report=write_report(value.output), cached_tokens=value.cached_tokens)


def read_prefill_output(message: worker_pb2.PrefillResponse) -> PrefillOutput:
    match message.WhichOneof("body"):
        case "token":
            return PrefillOutput(read_token(message.token), message.cached_tokens)
        case "report":
            return PrefillOutput(read_report(message.report), message.cached_tokens)
        case _:
            raise ValueError("a prefill response is a token or a report")


def write_decode(value: DecodeWork) -> worker_pb2.DecodeRequest:
    return worker_pb2.DecodeRequest(
        request=value.request,
        namespace=value.namespace,
        token_ids=value.token_ids,
        prompt_tokens=value.prompt_tokens,
        sampling=write_sampling(value.sampling),
        grant=value.grant,
        epoch=value.epoch,
    )


def read_decode(message: worker_pb2.DecodeRequest) -> DecodeWork:
    if not message.request or not 0 < message.prompt_tokens < len(message.token_ids):
        raise ValueError("a decode has a request id, a prompt and at least one generated token")
    return DecodeWork(
        request=RequestId(message.request),
        namespace=Namespace(message.namespace),
        token_ids=tuple(message.token_ids),
        prompt_tokens=message.prompt_tokens,
        sampling=read_sampling(message.sampling),
        grant=GrantId(message.grant),
        epoch=Epoch(message.epoch),
    )


def write_decode_output(value: Token) -> worker_pb2.DecodeResponse:
    return worker_pb2.DecodeResponse(token=write_token(value))


def read_decode_output(message: worker_pb2.DecodeResponse) -> Token:
    return read_token(message.token)


def write_load(value: WorkerLoad) -> worker_pb2.GetLoadResponse:
    return worker_pb2.GetLoadResponse(running=value.running, waiting=value.waiting)


def read_load(message: worker_pb2.GetLoadResponse) -> WorkerLoad:
    return WorkerLoad(message.running, message.waiting)


def write_announce(value: Announce) -> directory_pb2.AnnounceRequest:
    return directory_pb2.AnnounceRequest(node=write_node_info(value.node), ttl_seconds=value.ttl_seconds)


def read_announce(message: directory_pb2.AnnounceRequest) -> Announce:
    if not message.ttl_seconds > 0:
        raise ValueError("an announcement holds for a positive time")
    return Announce(read_node_info(message.node), message.ttl_seconds)


def write_nodes(value: tuple[NodeInfo, ...]) -> directory_pb2.ListNodesResponse:
    return directory_pb2.ListNodesResponse(nodes=[write_node_info(node) for node in value])


def read_nodes(message: directory_pb2.ListNodesResponse) -> tuple[NodeInfo, ...]:
    return tuple(read_node_info(node) for node in message.nodes)


def _blocks(ids: Iterable[int]) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in ids)


def _keys(keys: Iterable[bytes]) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(key) for key in keys)


def _owner(owner: str) -> OwnerId:
    if not owner:
        raise ValueError("blocks have a named owner")
    return OwnerId(owner)
