"""Requests and answers of the worker's service ↔ messages of worker.proto.

Each ``read_*`` raises ValueError where a message does not make a valid value; the RPC layer turns that into a ProtocolError.
"""

from __future__ import annotations

from kvferry.control import (
    DecodeWork,
    PrefillOutput,
    PrefillWork,
)
from kvferry.generation import FinishReason, SamplingParams, Token, TokenLogprob, WorkerLoad
from kvferry.keys import Namespace
from kvferry.proto import worker_pb2
from kvferry.proto.codec.shared import (
    inverse,
    read_report,
    read_ticket,
    write_report,
    write_ticket,
)
from kvferry.types import Epoch, GrantId, RequestId

__all__ = [
    "read_decode",
    "read_decode_output",
    "read_load",
    "read_prefill",
    "read_prefill_output",
    "read_sampling",
    "read_token",
    "write_decode",
    "write_decode_output",
    "write_load",
    "write_prefill",
    "write_prefill_output",
    "write_sampling",
    "write_token",
]

_FINISHES = {
    None: worker_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: worker_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: worker_pb2.FINISH_REASON_LENGTH,
}


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
        finish=inverse(_FINISHES, message.finish, "finish reason"),
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
