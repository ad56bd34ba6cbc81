"""What the daemon serves: to routers over TCP, to its worker over the unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvferry.control import (
    Acquire,
    Acquired,
    Attached,
    AwaitGrant,
    Empty,
    Extend,
    OpenGrant,
    PushMessage,
    RevokeGrant,
    Seal,
)
from kvferry.errors import CancelledByCallerError, InvalidRequestError, PeerUnavailableError, Stage, Where
from kvferry.handoff import HandoffReport, Ticket
from kvferry.kvstore.daemon.node import Node
from kvferry.node import NodeStatus, WorkerInfo
from kvferry.proto.codec import api, rpc
from kvferry.types import BlockId, OwnerId

__all__ = ["RouterService", "WorkerService"]

# A push without a deadline still ends: workers always set one, this is for people with grpcurl.
_LONGEST_PUSH_SECONDS = 600.0


class RouterService:
    """DaemonService."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def handlers(self) -> Sequence[tuple[rpc.Rpc[Any, Any], rpc.Handler]]:
        return [(api.OPEN_GRANT, self.open_grant), (api.REVOKE_GRANT, self.revoke_grant), (api.GET_STATUS, self.get_status)]

    async def open_grant(self, request: OpenGrant, _: rpc.Call) -> Ticket:
        node = self._node
        worker, store = node.worker, node.life.store
        where = Where(stage=Stage.GRANT, peer=str(node.address))
        if not worker.role.decodes:
            raise PeerUnavailableError(
                f"{node.address} grants nothing", where=where, why="its worker only prefills", hint="Decode elsewhere."
            )
        if request.tokens > worker.context:
            raise InvalidRequestError(
                f"a prompt of {request.tokens} tokens is too long",
                where=where,
                why=f"the model's context is {worker.context}",
                field="prompt",
            )
        return Ticket(store.open_grant(request), node.address, node.endpoint, store.layout, store.fingerprint)

    async def revoke_grant(self, request: RevokeGrant, _: rpc.Call) -> Empty:
        why = CancelledByCallerError("the router took the grant back", where=Where(stage=Stage.GRANT), why=request.why)
        self._node.life.store.revoke(request.grant, request.epoch, why)
        return Empty()

    async def get_status(self, _: Empty, __: rpc.Call) -> NodeStatus:
        return self._node.status()


class WorkerService:
    """AttachmentService."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def handlers(self) -> Sequence[tuple[rpc.Rpc[Any, Any], rpc.Handler]]:
        return [
            (api.ATTACH, self.attach),
            (api.ACQUIRE, self.acquire),
            (api.EXTEND, self.extend),
            (api.SEAL, self.seal),
            (api.RELEASE, self.release),
            (api.AWAIT_GRANT, self.await_grant),
            (api.PUSH, self.push),
        ]

    async def attach(self, worker: WorkerInfo, _: rpc.Call) -> AsyncIterator[Attached]:
        attendance, attached = await self._node.attach(worker)
        try:
            yield attached
            await attendance.over
        finally:
            self._node.detach(attendance)

    async def acquire(self, request: Acquire, _: rpc.Call) -> Acquired:
        return self._node.life.store.acquire(request.owner, request.keys, request.blocks)

    async def extend(self, request: Extend, _: rpc.Call) -> tuple[BlockId, ...]:
        return self._node.life.store.extend(request.owner, request.blocks)

    async def seal(self, request: Seal, _: rpc.Call) -> Empty:
        self._node.life.store.seal(request.owner, request.blocks, request.keys)
        return Empty()

    async def release(self, owner: OwnerId, _: rpc.Call) -> Empty:
        self._node.pushes.release(owner, self._node.life)
        return Empty()

    async def await_grant(self, request: AwaitGrant, _: rpc.Call) -> tuple[BlockId, ...]:
        return await self._node.await_grant(request.grant, request.epoch)

    async def push(self, messages: AsyncIterator[PushMessage], call: rpc.Call) -> HandoffReport:
        timeout = call.remaining_seconds()
        return await self._node.pushes.carry(self._node.life, messages, _LONGEST_PUSH_SECONDS if timeout is None else timeout)
