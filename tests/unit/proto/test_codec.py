"""Values survive the wire, and errors reach the other side as themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import fields, is_dataclass
from pathlib import Path as FilePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import control, errors
from kvferry.errors import (
    DeadlineExceededError,
    InternalError,
    KvferryError,
    OutOfBlocksError,
    PeerUnavailableError,
    Reason,
    error_class,
)
from kvferry.generation import SamplingParams, Token
from kvferry.handoff import HandoffReport, PagesReady
from kvferry.node import NodeStatus
from kvferry.proto.codec import api, rpc
from kvferry.proto.codec.errors import CODES
from kvferry.types import BlockId, OwnerId, Path, RequestId

RPCS = [getattr(api, name) for name in api.__all__]

_UINT32 = st.integers(0, 2**32 - 1)
st.register_type_strategy(int, st.integers(1, 2**32 - 1))
st.register_type_strategy(float, st.floats(0.5, 1.0))
st.register_type_strategy(str, st.text(min_size=1, max_size=12))
st.register_type_strategy(
    KvferryError,
    st.builds(
        lambda reason, what, why, stage, path: error_class(reason)(
            what, where=errors.Where(stage=stage, peer="p", path=path), why=why, hint="h"
        ),
        st.sampled_from(Reason),
        st.text(min_size=1),
        st.text(),
        st.sampled_from(errors.Stage),
        st.sampled_from(Path),
    ),
)


def _same(one: Any, other: Any) -> bool:
    """Equality that looks into errors, which compare by identity."""
    if isinstance(one, KvferryError):
        return type(one) is type(other) and (one.what, one.where, one.why, one.hint, one.field) == (
            other.what,
            other.where,
            other.why,
            other.hint,
            other.field,
        )
    if is_dataclass(one):
        return type(one) is type(other) and all(_same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _strategy(value: type) -> st.SearchStrategy[Any]:
    if value is control.DecodeWork:
        return st.builds(control.DecodeWork, token_ids=st.lists(_UINT32, min_size=2).map(tuple), prompt_tokens=st.just(1))
    if value is control.Seal:
        return st.lists(st.tuples(_UINT32, st.binary()), max_size=3).map(
            lambda pairs: control.Seal(OwnerId("o"), tuple(BlockId(b) for b, _ in pairs), tuple(k for _, k in pairs))  # type: ignore[misc]
        )
    return st.from_type(value)


VALUES: dict[str, type] = {
    "OpenGrant": control.OpenGrant,
    "RevokeGrant": control.RevokeGrant,
    "Acquire": control.Acquire,
    "Extend": control.Extend,
    "Seal": control.Seal,
    "AwaitGrant": control.AwaitGrant,
    "Decode": control.DecodeWork,
    "Announce": control.Announce,
}


@pytest.mark.parametrize("name", VALUES)
@given(data=st.data())
def test_requests_survive_the_wire(name: str, data: st.DataObject) -> None:
    method = next(candidate for candidate in RPCS if candidate.method == name)
    value = data.draw(_strategy(VALUES[name]))
    message = method.request.message.FromString(method.request.write(value).SerializeToString())
    assert _same(method.request.read(message), value)


@given(st.from_type(NodeStatus))
def test_status_survives_the_wire(value: Any) -> None:
    wire = api.GET_STATUS.response
    assert _same(wire.read(wire.message.FromString(wire.write(value).SerializeToString())), value)


@given(st.one_of(st.builds(Token, token_id=_UINT32), st.from_type(HandoffReport)), _UINT32)
def test_prefill_outputs_survive_the_wire(output: Any, cached: int) -> None:
    wire = api.PREFILL.response
    value = control.PrefillOutput(output, cached)
    assert wire.read(wire.message.FromString(wire.write(value).SerializeToString())) == value


def test_every_reason_has_a_code_and_every_method_its_message() -> None:
    assert set(CODES) == set(Reason)
    for method in RPCS:
        pool = method.request.message.DESCRIPTOR.file.pool
        service = pool.FindServiceByName(method.service)
        descriptor = service.methods_by_name[method.method]
        assert descriptor.input_type is method.request.message.DESCRIPTOR
        assert descriptor.output_type is method.response.message.DESCRIPTOR
        assert (descriptor.client_streaming, descriptor.server_streaming) == (method.streams_in, method.streams_out)


async def test_errors_arrive_as_themselves(tmp_path: FilePath) -> None:
    full = OutOfBlocksError("no blocks", where=errors.Where(stage=errors.Stage.GRANT), why="3 free, 5 needed", hint="Wait.")

    async def extend(request: control.Extend, call: rpc.Call) -> tuple[BlockId, ...]:
        if request.blocks == 1:
            raise full
        if request.blocks == 2:
            raise RuntimeError("a defect")
        remaining = call.remaining_seconds()
        assert remaining is not None
        assert remaining < 5
        return (BlockId(7),)

    async def push(messages: AsyncIterator[control.PushMessage], call: rpc.Call) -> Any:
        async for _ in messages:
            pass
        raise full

    async def decode(request: control.DecodeWork, call: rpc.Call) -> AsyncIterator[Token]:
        yield Token(1)
        raise full

    target = f"unix:{tmp_path / 's'}"
    server = await rpc.new_server([[(api.EXTEND, extend), (api.PUSH, push)], [(api.DECODE, decode)]])
    rpc.bind(server, target)
    await server.start()
    channel = rpc.connect(target)
    try:
        assert await rpc.call(channel, api.EXTEND, control.Extend(OwnerId("o"), 3), 5, "peer") == (7,)
        with pytest.raises(OutOfBlocksError) as caught:
            await rpc.call(channel, api.EXTEND, control.Extend(OwnerId("o"), 1), 5, "peer")
        assert _same(caught.value, full)
        with pytest.raises(InternalError, match="a defect"):
            await rpc.call(channel, api.EXTEND, control.Extend(OwnerId("o"), 2), 5, "peer")
        with pytest.raises(OutOfBlocksError):
            await rpc.send(channel, api.PUSH, _pages(), 5, "peer")
        work = control.DecodeWork(RequestId("r"), "", (1, 2), 1, SamplingParams(), 1, 1)  # type: ignore[arg-type]
        tokens = rpc.stream(channel, api.DECODE, work, 5, "peer")
        assert await anext(tokens) == Token(1)
        with pytest.raises(OutOfBlocksError):
            await anext(tokens)
    finally:
        await server.stop(0)
    with pytest.raises((PeerUnavailableError, DeadlineExceededError), match="peer"):
        await rpc.call(channel, api.EXTEND, control.Extend(OwnerId("o"), 3), 1, "peer")
    await channel.close()


async def test_a_channel_closed_during_a_call_is_a_lost_peer_and_no_cancellation(tmp_path: FilePath) -> None:
    never = asyncio.Event()

    async def extend(request: control.Extend, call: rpc.Call) -> tuple[BlockId, ...]:
        await never.wait()
        return ()

    async def push(messages: AsyncIterator[control.PushMessage], call: rpc.Call) -> Any:
        async for _ in messages:
            pass
        await never.wait()

    async def decode(request: control.DecodeWork, call: rpc.Call) -> AsyncIterator[Token]:
        yield Token(1)
        await never.wait()

    target = f"unix:{tmp_path / 's'}"
    server = await rpc.new_server([[(api.EXTEND, extend), (api.PUSH, push)], [(api.DECODE, decode)]])
    rpc.bind(server, target)
    await server.start()
    channel = rpc.connect(target)
    work = control.DecodeWork(RequestId("r"), "", (1, 2), 1, SamplingParams(), 1, 1)  # type: ignore[arg-type]
    tokens = rpc.stream(channel, api.DECODE, work, 5, "peer")
    assert await anext(tokens) == Token(1)
    wanted = control.Extend(OwnerId("o"), 1)
    given_up = asyncio.create_task(rpc.call(channel, api.EXTEND, wanted, 5, "peer"))
    lost = [
        asyncio.create_task(rpc.call(channel, api.EXTEND, wanted, 5, "peer")),
        asyncio.create_task(rpc.send(channel, api.PUSH, _pages(), 5, "peer")),
        asyncio.ensure_future(anext(tokens)),
    ]
    await asyncio.sleep(0.1)  # they are on their way
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    await channel.close()
    for outcome in await asyncio.gather(*lost, return_exceptions=True):
        assert isinstance(outcome, PeerUnavailableError), repr(outcome)
    await server.stop(0)


async def _pages() -> AsyncIterator[control.PushMessage]:
    yield PagesReady(0, 1, 0, 5)
