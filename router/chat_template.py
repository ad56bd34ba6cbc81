"""A model's chat template, as published with its tokenizer: a Jinja text that lays a conversation out for the model.

The environment is the one Hugging Face documents for chat templates: sandboxed and immutable (a template comes with a
model's files and is not trusted), block lines trimmed, ``break``/``continue``, ``tojson``, ``raise_exception`` and
``strftime_now``. Rendering it here spares the router transformers, which imports torch: 5 s of CPU and 400 MB a router.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.errors import ModelFilesError

__all__ = ["ChatTemplate", "find_template"]

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """``special_tokens``: what the template knows as ``bos_token`` and the like. Raises TemplateError on a broken text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = time.strftime
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text up to where the assistant speaks. Raises TemplateError where the template refuses the conversation."""
        return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special_tokens)


def find_template(model_dir: Path) -> ChatTemplate | None:
    """The template in ``model_dir``, from chat_template.jinja or tokenizer_config.json; None where the model has none.

    Raises ModelFilesError where there is one that cannot be read.
    """
    try:
        config = _read_config(model_dir / "tokenizer_config.json")
        source = _source(model_dir, config)
        return None if source is None else ChatTemplate(source, _special_tokens(config))
    except (OSError, ValueError, TemplateError) as error:
        raise ModelFilesError(f"the chat template in {model_dir} cannot be used", why=str(error)) from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    config = json.loads(path.read_bytes())
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} is not an object")
    return config


def _source(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    file = model_dir / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name; the one for plain conversations is "default"
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise ValueError("chat_template is not a text")
    return source


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens are texts, or objects whose ``content`` is the text."""
    found = {name: config.get(name) for name in _SPECIAL}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    """Unlike Jinja's own, escapes nothing for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
