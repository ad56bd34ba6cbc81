"""From a checked body to what the engine is asked: namespace, prompt ids and sampling, within the model's context."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers

from kvferry.errors import InvalidRequestError
from kvferry.generation import SamplingParams
from kvferry.keys import Namespace
from kvferry.router.schema import MAX_NAMESPACE, ChatBody, CompletionBody
from kvferry.router.tokenizer import ModelText

__all__ = ["NAMESPACE_HEADER", "namespace_of", "prompt_ids", "sampling"]

NAMESPACE_HEADER = "x-kvferry-namespace"

_DEFAULT_COMPLETION_TOKENS = 16


def namespace_of(field: str | None, headers: Headers) -> Namespace:
    header = headers.get(NAMESPACE_HEADER)
    if header is not None and len(header) > MAX_NAMESPACE:
        raise InvalidRequestError(
            f"{NAMESPACE_HEADER}: may have at most {MAX_NAMESPACE} characters, has {len(header)}", field=NAMESPACE_HEADER
        )
    if field is not None and header is not None and field != header:
        raise InvalidRequestError(f"kv_namespace: contradicts the header {NAMESPACE_HEADER}", field="kv_namespace")
    return Namespace(field if field is not None else header or "")


def prompt_ids(body: ChatBody | CompletionBody, text: ModelText, context: int) -> tuple[int, ...]:
    """Token ids of the prompt, at least one place short of the context. Raises InvalidRequestError."""
    if isinstance(body, ChatBody):
        field, ids = "messages", text.chat_prompt(body.messages, context)
    elif isinstance(body.prompt, str):
        field, ids = "prompt", text.completion_prompt(body.prompt, context)
    else:
        field, ids = "prompt", body.prompt
        if max(ids) >= text.tokens:
            raise InvalidRequestError(
                f"prompt: holds token id {max(ids)}, but the model's ids end at {text.tokens - 1}", field="prompt"
            )
    if len(ids) >= context:
        raise InvalidRequestError(
            f"{field}: has {len(ids)} tokens, which leaves no room for an answer in the model's context of {context} tokens",
            field=field,
        )
    return ids


def sampling(body: ChatBody | CompletionBody, prompt_tokens: int, context: int) -> SamplingParams:
    room = context - prompt_tokens
    chat = isinstance(body, ChatBody)
    asked = (body.max_completion_tokens or body.max_tokens) if isinstance(body, ChatBody) else body.max_tokens
    if asked is not None and asked > room:
        field = "max_completion_tokens" if isinstance(body, ChatBody) and body.max_completion_tokens else "max_tokens"
        raise InvalidRequestError(
            f"{field}: is {asked}, but the model's context of {context} tokens leaves {room} after a prompt of {prompt_tokens}",
            field=field,
        )
    top_logprobs = (body.top_logprobs or 0 if body.logprobs else None) if isinstance(body, ChatBody) else body.logprobs
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        seed=secrets.randbits(63) if body.seed is None else body.seed % 2**64,
        max_tokens=asked if asked is not None else room if chat else min(_DEFAULT_COMPLETION_TOKENS, room),
        ignore_eos=bool(body.ignore_eos),
        top_logprobs=top_logprobs,
    )
