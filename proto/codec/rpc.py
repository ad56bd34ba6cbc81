"""One RPC as a value, and the four ways to call or serve it in the vocabulary's own types.

Handlers are coroutines (or async generators) over values. A KvferryError they raise reaches the caller as the same error;
anything else is a defect: logged here with its traceback, and an InternalError there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.errors import ConfigError, InternalError, KvferryError, PeerUnavailableError, ProtocolError, Stage, Where
from kvferry.proto.codec.errors import from_rpc_error, to_status

__all__ = ["Call", "Handler", "Rpc", "Wire", "bind", "call", "connect", "new_server", "send", "serve", "stream"]

log = logging.getLogger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")
V = TypeVar("V")

# Longest message either side takes: a 128k-token prompt is under 1 MiB of ids and keys; nothing legitimate is larger.
_MAX_MESSAGE_BYTES = 4 << 20
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two channels to one restarted address must not share a subchannel that is in back-off.
    ("grpc.use_local_subchannel_pool", 1),
    # An occupied port is an error, not a second server that takes half of the calls.
    ("grpc.so_reuseport", 0),
    # A proxy named in the environment must never see control traffic.
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class Wire(Generic[V]):
    """How one kind of value crosses: its message class, and the functions there and back."""

    message: type[Message]
    write: Callable[[V], Message]
    read: Callable[[Any], V]


@dataclass(frozen=True, slots=True)
class Rpc(Generic[Q, A]):
    """One method: ``service`` is the full name with its package; ``stage``: what of a request's life it serves.

    ``streams_in``/``streams_out`` as in the .proto.
    """

    service: str
    method: str
    request: Wire[Q]
    response: Wire[A]
    stage: Stage | None = None
    streams_in: bool = False
    streams_out: bool = False

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.method}"


class Call:
    """What a handler may know of the call it serves."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    def remaining_seconds(self) -> float | None:
        """Time until the caller's deadline; None if it set none."""
        return self._context.time_remaining()


Handler = Callable[[Any, Call], Any]


def connect(target: str) -> grpc.aio.Channel:
    """A lazy channel to "HOST:PORT" or "unix:PATH" with kvferry's limits; close it with ``await channel.close()``."""
    return grpc.aio.insecure_channel(target, options=_OPTIONS)


async def call(channel: grpc.aio.Channel, rpc: Rpc[Q, A], request: Q, timeout: float, peer: str) -> A:
    """Unary call. ``timeout`` in seconds is the deadline; ``peer`` names the other side in errors.

    Raises the KvferryError the other side raised, or PeerUnavailableError, DeadlineExceededError, ProtocolError.
    """
    multi = channel.unary_unary(rpc.path, _serialize, rpc.response.message.FromString)
    try:
        answer = await multi(rpc.request.write(request), timeout=timeout)
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
        raise _failure(error, rpc, peer) from error
    return _read(rpc.response, answer, rpc.method, peer)


async def stream(
    channel: grpc.aio.Channel, rpc: Rpc[Q, A], request: Q, timeout: float | None, peer: str
) -> AsyncGenerator[A, None]:
    """Server-streaming call; closing the iterator early cancels the call. Raises as :func:`call` does."""
    multi = channel.unary_stream(rpc.path, _serialize, rpc.response.message.FromString)
    running = None
    try:
        running = multi(rpc.request.write(request), timeout=timeout)
        async for answer in running:
            yield _read(rpc.response, answer, rpc.method, peer)
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
        raise _failure(error, rpc, peer) from error
    finally:
        if running is not None:
            running.cancel()


async def send(channel: grpc.aio.Channel, rpc: Rpc[Q, A], requests: AsyncIterator[Q], timeout: float, peer: str) -> A:
    """Client-streaming call; cancelled when the awaiting task is. Raises as :func:`call` does."""
    multi = channel.stream_unary(rpc.path, _serialize, rpc.response.message.FromString)
    try:
        answer = await multi((rpc.request.write(request) async for request in requests), timeout=timeout)
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
        raise _failure(error, rpc, peer) from error
    return _read(rpc.response, answer, rpc.method, peer)


def bind(server: grpc.aio.Server, address: str, advertise: str = "") -> str:
    """Listen on "HOST:PORT" (port 0: a free one) or "unix:PATH"; the target under which others reach it.

    ``advertise`` is that target where the address bound is not it; its port 0 stands for the bound one. Raises ConfigError
    where the address cannot be had.
    """
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}", why=str(error), hint="Is it in use? Choose another address.") from error
    if address.startswith("unix:"):
        return address
    host, _, wanted = (advertise or address).rpartition(":")
    return f"{host}:{port if wanted == '0' else wanted}"


async def new_server(services: Sequence[Sequence[tuple[Rpc[Any, Any], Handler]]]) -> grpc.aio.Server:
    """A server of the given services (each a list of (rpc, handler)) plus gRPC health and reflection; not started yet."""
    server = grpc.aio.server(options=_OPTIONS)
    names = [reflection.SERVICE_NAME, health.SERVICE_NAME]
    for service in services:
        handlers = {rpc.method: serve(rpc, handler) for rpc, handler in service}
        name = service[0][0].service
        names.append(name)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection(names, server)
    for name in ("", *names):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server


def serve(rpc: Rpc[Q, A], handler: Handler) -> grpc.RpcMethodHandler[Any, Any]:
    """The grpc handler of ``rpc``.

    ``handler(request, call)`` gets a value, or an async iterator of values where the method streams in; it is a coroutine
    function, or an async generator function where the method streams out.
    """

    def request_value(message: Any) -> Any:
        if not rpc.streams_in:
            return _read(rpc.request, message, rpc.method, "caller")
        return (_read(rpc.request, part, rpc.method, "caller") async for part in message)

    async def unary(message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
        try:
            return rpc.response.write(await handler(request_value(message), Call(context)))
        except Exception as error:  # noqa: BLE001  # the edge: _abort re-raises it as the call's status
            await _abort(context, rpc, error)

    async def streaming(message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Message]:
        answers = handler(request_value(message), Call(context))
        try:
            async for answer in answers:
                yield rpc.response.write(answer)
        except Exception as error:  # noqa: BLE001  # the edge: _abort re-raises it as the call's status
            await _abort(context, rpc, error)
        finally:
            await answers.aclose()

    kind = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
    }[rpc.streams_in, rpc.streams_out]
    return kind(streaming if rpc.streams_out else unary, rpc.request.message.FromString, _serialize)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], rpc: Rpc[Any, Any], error: Exception) -> NoReturn:
    """The edge where errors leave the process."""
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.UsageError)):
        raise error
    if not isinstance(error, KvferryError):
        log.error("%s failed by a defect", rpc.path, exc_info=error)
        error = InternalError(f"{rpc.method} failed", why=f"{type(error).__name__}: {error}", hint="Please report this.")
    await context.abort_with_status(to_status(error))
    raise asyncio.CancelledError  # abort_with_status has raised already; this tells the type checker


def _failure(
    error: grpc.aio.AioRpcError | grpc.aio.UsageError | asyncio.CancelledError, rpc: Rpc[Any, Any], peer: str
) -> KvferryError:
    """What a failed call means. Raises the cancellation of the calling task itself."""
    where = Where(stage=rpc.stage, peer=peer)
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc_error(error, rpc.method, where)
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
    # What grpc says of a call on a channel that is closed, before or during it: the tie to the peer had been given up.
    return PeerUnavailableError(f"{rpc.method} did not reach its peer", where=where, why=str(error) or "the channel was closed")


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _read(wire: Wire[V], message: Any, method: str, peer: str) -> V:
    try:
        return wire.read(message)
    except ValueError as error:
        raise ProtocolError(
            f"{method} carried an invalid message", where=Where(peer=peer), why=str(error), hint="Are both of one version?"
        ) from error
