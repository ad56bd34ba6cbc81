"""Tokenizers of the models that workers serve, loaded from the workers' model directories, used in threads."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from tokenizers import Tokenizer

from kvferry.errors import InvalidRequestError, ModelFilesError
from kvferry.node import WorkerInfo
from kvferry.router.chat_template import ChatTemplate, find_template
from kvferry.router.schema import Message

__all__ = ["ModelText", "Tokenizers", "load"]

log = logging.getLogger(__name__)

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ModelText:
    """One model's tokenizer and chat template. Methods are thread-safe; ``prompt``s may take long, the others do not."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._fast = tokenizer
        self._template = template
        # Both are state that calls would share between threads; neither is ever wanted here.
        self._fast.no_truncation()
        self._fast.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.tokens: int = len(vocabulary)
        self._longest_token = max(map(len, vocabulary), default=1)

    def completion_prompt(self, text: str, limit: int) -> tuple[int, ...]:
        """Ids of a plain prompt, with what the model puts at the start of a text.

        Raises InvalidRequestError, cheaply, where the text is sure to have more than ``limit`` tokens.
        """
        return self._encode(text, limit, "prompt", add_special_tokens=True)

    def chat_prompt(self, messages: Sequence[Message], limit: int) -> tuple[int, ...]:
        """Ids of a conversation in the model's own form, up to where the assistant speaks. Raises as above."""
        if self._template is None:
            raise InvalidRequestError(
                "messages: the model has no chat template", hint="Send a plain prompt to /v1/completions.", field="messages"
            )
        conversation = [message.model_dump() for message in messages]
        try:
            text = self._template.render(conversation)
        except TemplateError as error:
            raise InvalidRequestError(
                "messages: the model's chat template refuses the conversation", why=str(error), field="messages"
            ) from error
        return self._encode(text, limit, "messages", add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=True)
        return text

    def shown(self, token_id: int) -> tuple[str, bytes | None]:
        """One token, special or not, for log probabilities: its text and its bytes.

        A token that is no whole text is shown as ``bytes:\\xe4\\xbd``; the bytes are None where they cannot be told.
        """
        text: str = self._fast.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return text, text.encode()
        raw = _raw_bytes(self._fast.id_to_token(token_id) or "")
        return ("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw) if raw else (text, None)

    def _encode(self, text: str, limit: int, field: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        at_least = len(text.encode()) // (4 * self._longest_token)
        if at_least > limit:
            raise InvalidRequestError(
                f"{field}: has at least {at_least} tokens, but the model's context is {limit} tokens", field=field
            )
        # Unlike encode, encode_batch lets other threads run meanwhile.
        ids = tuple(self._fast.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
        if not ids:
            raise InvalidRequestError(f"{field}: must not be empty", why="it has no tokens", field=field)
        return ids


def _raw_bytes(token: str) -> bytes | None:
    """Bytes of a vocabulary entry: one character a byte (byte-level BPE), or <0xE4> (byte fallback)."""
    fallback = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    if fallback:
        return bytes.fromhex(fallback[1])
    found = [_BYTE_OF.get(character) for character in token]
    return None if None in found else bytes(byte for byte in found if byte is not None)


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes a printable byte as itself and the others, in order, as the characters from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def load(model_dir: Path) -> ModelText:
    """Read a tokenizer from files on this machine; nothing is fetched. Raises ModelFilesError."""
    if not model_dir.is_dir():
        raise ModelFilesError(f"there is no model directory {model_dir}", hint="Routers need the tokenizer at the workers' path.")
    try:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exceptions for whatever is wrong with the file
        hint = "Routers need the model's tokenizer.json."
        raise ModelFilesError(f"the tokenizer in {model_dir} cannot be loaded", why=str(error), hint=hint) from error
    return ModelText(tokenizer, find_template(model_dir))


class Tokenizers:
    """One :class:`ModelText` a model, loaded once, in a thread; a failure is not kept."""

    def __init__(self) -> None:
        self._loads: dict[tuple[str, str], asyncio.Task[ModelText]] = {}

    async def of(self, worker: WorkerInfo) -> ModelText:
        """The text side of the model that ``worker`` serves. Raises ModelFilesError."""
        key = (worker.model_dir, worker.fingerprint.revision)
        task = self._loads.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(asyncio.to_thread(load, Path(worker.model_dir)))
            self._loads[key] = task
            log.info("loading the tokenizer of %s from %s", worker.model, worker.model_dir)
        # Shielded: a client that leaves must not take the tokenizer from the others.
        return await asyncio.shield(task)
