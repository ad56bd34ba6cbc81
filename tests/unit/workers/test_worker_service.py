"""The worker's calls end in every order of events, and the engine is told each time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.control import DecodeWork, PrefillWork
from kvferry.errors import KvferryError, StaleGrantError
from kvferry.generation import FinishReason, SamplingParams, Token
from kvferry.handoff import DataEndpoint, Grant, Ticket
from kvferry.keys import Fingerprint, Namespace
from kvferry.layout import DType, Layout
from kvferry.types import BlockId, Epoch, GrantId, Incarnation, NodeAddress, NodeId, OwnerId, RequestId, Role
from kvferry.workers.sequence import Listener
from kvferry.workers.service import WorkerService

REQUEST = RequestId("r")


class OneTokenEngine:
    """Answers each prompt with a token that is the last."""

    def __init__(self) -> None:
        self.cancelled: list[OwnerId] = []

    def prefill(self, _: PrefillWork, listener: Listener) -> None:
        listener.on_token(Token(1, finish=FinishReason.STOP), 0)

    def cancel(self, owner: OwnerId, _: KvferryError) -> None:
        self.cancelled.append(owner)


class SlowAttachment:
    """What it is asked takes until ``go`` is set, its own cancellation too."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.released: list[OwnerId] = []

    async def push(self, *_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await self.go.wait()

    async def await_grant(self, *_: object) -> tuple[BlockId, ...]:
        raise StaleGrantError("gone")

    async def release(self, owner: OwnerId) -> None:
        await self.go.wait()
        self.released.append(owner)


class Call:
    def remaining_seconds(self) -> float:
        return 10.0


def _service() -> tuple[WorkerService, OneTokenEngine, SlowAttachment]:
    service, engine, attachment = WorkerService(Role.BOTH), OneTokenEngine(), SlowAttachment()
    attach: Any = service.attach
    attach(engine, attachment)
    return service, engine, attachment


async def _cancel_in_its_end(ending: asyncio.Task[Any]) -> None:
    """Cancel a call that is past its last answer and waits for something of its own."""
    await asyncio.sleep(0.05)
    assert not ending.done()
    ending.cancel()
    await asyncio.sleep(0.05)


async def test_a_caller_that_leaves_while_the_call_ends_leaves_no_blocks_held() -> None:
    service, engine, attachment = _service()
    layout = Layout(layers=1, tensors=2, heads=1, head_dim=8, dtype=DType.FLOAT32, block_tokens=4)
    grant = Grant(grant=GrantId(1), epoch=Epoch(1), request=REQUEST, blocks=(BlockId(0),), tokens=3, cached_tokens=0)
    address = NodeAddress(NodeId("n"), Incarnation("i"))
    ticket = Ticket(grant, address, DataEndpoint("h", "/nowhere", "127.0.0.1:1"), layout, Fingerprint("m", "r", "float32"))
    call: Any = Call()
    answers: Any = service.prefill(PrefillWork(REQUEST, Namespace(""), (1, 2, 3), SamplingParams(), ticket), call)
    assert (await anext(answers)).output.finish is FinishReason.STOP
    ending = asyncio.create_task(anext(answers))
    await _cancel_in_its_end(ending)
    attachment.go.set()
    await asyncio.gather(ending, return_exceptions=True)
    assert engine.cancelled == ["r/prefill"]


async def test_blocks_of_a_grant_not_taken_are_released_even_when_the_caller_leaves_meanwhile() -> None:
    service, _, attachment = _service()
    call: Any = Call()
    work = DecodeWork(REQUEST, Namespace(""), (1, 2, 3), 2, SamplingParams(), GrantId(1), Epoch(1))
    tokens: Any = service.decode(work, call)
    ending = asyncio.create_task(anext(tokens))
    await _cancel_in_its_end(ending)
    attachment.go.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    await asyncio.sleep(0.05)
    assert attachment.released == ["r/decode"]
