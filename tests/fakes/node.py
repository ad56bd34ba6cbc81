"""A scripted daemon and worker behind real gRPC: what a router talks to, without memory or a model."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath

import grpc.aio

from kvferry.control import DecodeWork, Empty, OpenGrant, PrefillOutput, PrefillWork, RevokeGrant
from kvferry.errors import KvferryError, OutOfBlocksError, Stage, StaleGrantError, Where
from kvferry.generation import FinishReason, Token, TokenLogprob, WorkerLoad
from kvferry.handoff import DataEndpoint, Grant, HandoffOutcome, HandoffRecord, HandoffReport, Ticket
from kvferry.keys import Fingerprint
from kvferry.kvstore.directory import EmbeddedDirectory
from kvferry.layout import DType, Layout
from kvferry.node import Holding, NodeInfo, NodeStatus, WorkerInfo
from kvferry.proto.codec import api, rpc
from kvferry.types import BlockId, Epoch, GrantId, Incarnation, NodeAddress, NodeId, OwnerId, Path, PoolCounts, RequestId, Role

__all__ = ["FINGERPRINT", "MODEL", "FakeNode", "Hub", "Script"]

MODEL = "tiny"
FINGERPRINT = Fingerprint(model="TinyForCausalLM", revision="r1", dtype="float32")

_ids = itertools.count(1)


@dataclass
class Hub:
    """What the nodes of one cluster share: the answer to every prompt, and which hand-offs are in.

    ``answer``: ids that every prompt is answered with; when they are used up comes ``eos``.
    """

    eos: int = 0
    answer: Sequence[int] = (5, 6, 7, 8)
    landed: dict[str, asyncio.Event] = field(default_factory=dict)

    def land(self, request: str) -> asyncio.Event:
        return self.landed.setdefault(request, asyncio.Event())

    def token(self, index: int, work: PrefillWork | DecodeWork) -> Token:
        """The ``index``-th token of the answer to ``work``."""
        sampling = work.sampling
        given_out = index >= len(self.answer)
        token_id = self.eos if given_out else self.answer[index]
        stops = given_out and not sampling.ignore_eos
        finish = FinishReason.STOP if stops else FinishReason.LENGTH if index + 1 == sampling.max_tokens else None
        if sampling.top_logprobs is None:
            return Token(token_id, finish=finish)
        top = tuple(TokenLogprob(token_id + offset, -0.5 - offset) for offset in range(sampling.top_logprobs))
        return Token(token_id, logprob=-0.5, top=top, finish=finish)


@dataclass
class Script:
    """What goes wrong with client requests (probes are served well): errors are used up one a call."""

    grant_errors: deque[KvferryError] = field(default_factory=deque)
    prefill_errors: deque[KvferryError] = field(default_factory=deque)
    handoff_errors: deque[KvferryError] = field(default_factory=deque)
    decode_errors: deque[tuple[int, KvferryError]] = field(default_factory=deque)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    grant_seconds: float = 0.0
    probe_error: KvferryError | None = None


class FakeNode:
    """One node, both services on one port. Counts what it holds and keeps what it was asked."""

    def __init__(
        self,
        name: str,
        role: Role,
        model_dir: FilePath,
        hub: Hub,
        *,
        block_tokens: int = 4,
        blocks: int = 64,
        context: int = 128,
        layers: int = 2,
        model: str = MODEL,
        fingerprint: Fingerprint = FINGERPRINT,
    ) -> None:
        self.address = NodeAddress(NodeId(name), Incarnation(f"{next(_ids):08x}00000000"))
        self.script = Script()
        self.layout = Layout(layers, 2, 1, 8, DType.FLOAT32, block_tokens, blocks)
        self.grants: dict[GrantId, Grant] = {}
        self.revoked: list[GrantId] = []
        self.prefills: list[PrefillWork] = []
        self.decodes: list[DecodeWork] = []
        self.opened: list[OpenGrant] = []
        self.handoffs: list[HandoffRecord] = []
        self.prefilling = 0
        self.decoding = 0
        self.cancelled = 0
        self.given_out = 0
        self._role = role
        self._model_dir = model_dir
        self._hub = hub
        self._context = context
        self._model = model
        self._fingerprint = fingerprint
        self._server: grpc.aio.Server | None = None
        self._target = ""
        self._grant_ids = itertools.count(1)

    @property
    def info(self) -> NodeInfo:
        worker = WorkerInfo(
            self._role, self._target, self._model, str(self._model_dir), self._context, self.layout, self._fingerprint
        )
        return NodeInfo(self.address, self._target, self._endpoint, worker)

    @property
    def busy(self) -> bool:
        """Whether anything of any request is still here."""
        return bool(self.grants or self.prefilling or self.decoding)

    @property
    def _endpoint(self) -> DataEndpoint:
        return DataEndpoint("host", "/nowhere/data.sock", "127.0.0.1:1")

    async def start(self, directory: EmbeddedDirectory) -> None:
        """Serve and be listed."""
        self._server = await rpc.new_server(
            [
                [(api.OPEN_GRANT, self._open_grant), (api.REVOKE_GRANT, self._revoke), (api.GET_STATUS, self._status)],
                [(api.PREFILL, self._prefill), (api.DECODE, self._decode), (api.GET_LOAD, self._load)],
            ]
        )
        self._target = rpc.bind(self._server, "127.0.0.1:0")
        await self._server.start()
        await directory.announce(self.info, 600)

    async def die(self) -> None:
        """Stop answering at once; the listing does not know."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
        self.grants.clear()

    async def _open_grant(self, request: OpenGrant, _: rpc.Call) -> Ticket:
        if not _is_probe(request.request):
            self.opened.append(request)
            await asyncio.sleep(self.script.grant_seconds)
            if self.script.grant_errors:
                raise self.script.grant_errors.popleft()
        blocks = self.layout.blocks_for(request.tokens)
        if blocks > self.layout.blocks - self._leased():
            raise OutOfBlocksError("the pool is full", where=Where(Stage.GRANT, str(self.address)))
        grant = Grant(
            GrantId(next(self._grant_ids)), Epoch(1), request.request, tuple(BlockId(i) for i in range(blocks)), request.tokens, 0
        )
        self.grants[grant.grant] = grant
        return Ticket(grant, self.address, self._endpoint, self.layout, self._fingerprint)

    async def _revoke(self, request: RevokeGrant, _: rpc.Call) -> Empty:
        if self.grants.pop(request.grant, None) is None:
            raise StaleGrantError(f"grant {request.grant} is not open")
        self.revoked.append(request.grant)
        return Empty()

    async def _prefill(self, work: PrefillWork, _: rpc.Call) -> AsyncIterator[PrefillOutput]:
        probe = _is_probe(work.request)
        self.prefilling += 1
        try:
            if probe and self.script.probe_error is not None:
                raise self.script.probe_error
            if not probe:
                self.prefills.append(work)
                await asyncio.sleep(self.script.prefill_seconds)
                if self.script.prefill_errors:
                    raise self.script.prefill_errors.popleft()
            token = self._hub.token(0, work)
            yield PrefillOutput(token, cached_tokens=2)
            if work.ticket is None or token.finish is not None:
                return
            if not probe and self.script.handoff_errors:
                raise self.script.handoff_errors.popleft()
            report = self._report(work.request, work.ticket)
            self.handoffs.insert(0, HandoffRecord(report, HandoffOutcome.COMPLETE, None, 0.5))
            self._hub.land(work.request).set()
            yield PrefillOutput(report)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.prefilling -= 1

    async def _decode(self, work: DecodeWork, _: rpc.Call) -> AsyncIterator[Token]:
        probe = _is_probe(work.request)
        self.decoding += 1
        try:
            if not probe:
                self.decodes.append(work)
            fail_after, error = self.script.decode_errors.popleft() if not probe and self.script.decode_errors else (-1, None)
            if error is not None and fail_after == 0:
                raise error
            await self._hub.land(work.request).wait()
            if self.grants.pop(work.grant, None) is None:
                raise StaleGrantError(f"grant {work.grant} is not open", where=Where(Stage.DECODE))
            for index in itertools.count(1):
                if error is not None and index > fail_after:
                    raise error
                if not probe:
                    await asyncio.sleep(self.script.decode_seconds)
                token = self._hub.token(index, work)
                self.given_out += not probe
                yield token
                if token.finish is not None:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.decoding -= 1

    async def _load(self, _: Empty, __: rpc.Call) -> WorkerLoad:
        return WorkerLoad(self.prefilling + self.decoding, 0)

    async def _status(self, _: Empty, __: rpc.Call) -> NodeStatus:
        leased = self._leased()
        holdings = tuple(
            Holding(OwnerId(f"{grant.request}/decode"), len(grant.blocks), 1.5, 30.0) for grant in self.grants.values()
        )
        pool = PoolCounts(free=self.layout.blocks - leased, owned=0, leased=leased, quarantined=0, cached=3)
        return NodeStatus(self.info, pool, holdings, tuple(self.handoffs))

    def _leased(self) -> int:
        return sum(len(grant.blocks) for grant in self.grants.values())

    def _report(self, request: RequestId, ticket: Ticket) -> HandoffReport:
        moved = ticket.grant.tokens * self.layout.layers * self.layout.tensors * self.layout.token_bytes
        return HandoffReport(request, self.address, ticket.target, Path.SHM, ticket.grant.tokens, moved, 8, 0.001, 0.0005)


def _is_probe(request: str) -> bool:
    return request.startswith("probe-")
