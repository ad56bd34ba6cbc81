"""What clients may send: the bodies of OpenAI's two endpoints, checked field by field.

Fields of OpenAI's API that change the answer and are not served are refused by name; unknown ones are ignored, as clients
send many that change nothing here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvferry.errors import InvalidRequestError

__all__ = ["MAX_NAMESPACE", "ChatBody", "CompletionBody", "Message", "StreamOptions", "parse_body"]

_MAX_STOPS = 4
_MAX_STOP_CHARACTERS = 1024
_MAX_TOKEN = 2**31 - 1
_MAX_LOGPROBS = 20
MAX_NAMESPACE = 256


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", "{message}", {"message": message})


def _at(field: str, message: str) -> PydanticCustomError:
    """An error of a whole model that names the field at fault."""
    return PydanticCustomError("value_error", "{message}", {"message": message, "field": field})


def _read_stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong(f"must be a string or an array of at most {_MAX_STOPS} strings")
    if len(stops) > _MAX_STOPS:
        raise _wrong(f"may hold at most {_MAX_STOPS} strings, holds {len(stops)}")
    if not all(0 < len(stop) <= _MAX_STOP_CHARACTERS for stop in stops):
        raise _wrong(f"each stop string must have 1 to {_MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _read_prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        if not all(0 <= item <= _MAX_TOKEN for item in value):
            raise _wrong("holds a number that is not a token id")
        return tuple(value)
    if value in ("", []):
        raise _wrong("must not be empty")
    if isinstance(value, list) and all(isinstance(item, (str, list)) for item in value):
        raise _wrong("must be one prompt: a string or an array of token ids; send a request for each prompt")
    raise _wrong("must be a string or an array of token ids")


def _read_content(value: Any) -> str:
    """Text, or OpenAI's list of parts, of which text is the only kind here."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong("must be a string or an array of text parts")
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _wrong(f'part {index} must be an object of type "text"; no other kind is supported')
        if not isinstance(part.get("text"), str):
            raise _wrong(f"part {index} must have a string in its field text")
    return "".join(part["text"] for part in value)


def _refuse_empty(value: Any) -> Any:
    if value == []:
        raise _wrong("must not be empty")
    return value


def _unlimited_is_zero(value: int) -> int:
    return max(value, 0)


_Tokens = Annotated[int, Field(ge=1, le=_MAX_TOKEN)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False


class Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_read_content)]


class _Body(BaseModel):
    """Fields that both endpoints have."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: _Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_TOKEN), AfterValidator(_unlimited_is_zero)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_read_stop)] = ()
    ignore_eos: bool | None = None
    return_token_ids: bool = False
    user: str | None = None
    kv_namespace: Annotated[str, Field(max_length=MAX_NAMESPACE)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @model_validator(mode="after")
    def _check(self) -> _Body:
        if self.n not in (None, 1):
            raise _at("n", "must be 1: one answer a request")
        if self.stream_options is not None and not self.stream:
            raise _at("stream_options", "may only be set together with stream: true")
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise _at(name, "is not supported")
        return self


class ChatBody(_Body):
    """``POST /v1/chat/completions``"""

    messages: Annotated[list[Message], BeforeValidator(_refuse_empty)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None
    tools: Any = None
    functions: Any = None
    response_format: Any = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise _at("top_logprobs", "needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _at("max_tokens", "contradicts max_completion_tokens; set one of them")
        for name in ("tools", "functions"):
            if getattr(self, name):
                raise _at(name, "is not supported")
        if self.response_format not in (None, {"type": "text"}):
            raise _at("response_format", 'only {"type": "text"} is supported')
        return self


class CompletionBody(_Body):
    """``POST /v1/completions``"""

    prompt: Annotated[str | tuple[int, ...], PlainValidator(_read_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        if self.best_of not in (None, 1):
            raise _at("best_of", "must be 1")
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise _at(name, "is not supported")
        return self


B = TypeVar("B", bound=BaseModel)


def parse_body(cls: type[B], body: bytes) -> B:
    """A checked body. Raises InvalidRequestError naming the first field at fault."""
    try:
        return cls.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return InvalidRequestError("the body is not valid JSON", why=str(context.get("error", "")))
    field = context.get("field") or _dotted(first["loc"])
    if not field:
        return InvalidRequestError("the body must be a JSON object", why=first["msg"])
    message = "is required" if first["type"] == "missing" else first["msg"]
    return InvalidRequestError(f"{field}: {message}", field=field)


def _dotted(location: tuple[int | str, ...]) -> str:
    """``messages[0].content`` from ("messages", 0, "content")."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
