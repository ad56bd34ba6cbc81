"""Chat templates render as transformers renders them, and cannot do harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from kvferry.errors import ModelFilesError
from kvferry.router.chat_template import ChatTemplate, find_template

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}\n  {% if m['role'] == 'system' %}\n<S>{{ m.content | trim }}\n  {% endif %}\n"
        "{{ '<' + m['role'] + '>' + m['content'] + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
    ),
    "controls": (
        "{{- bos_token }}{% for m in messages -%} {% if loop.index > 2 %}{% break %}{% endif %}"
        "{% if not m.content %}{% continue %}{% endif %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{% endfor %}"
    ),
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}
TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=12)}), max_size=4
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=MESSAGES)
def test_renders_as_transformers_does(name: str, messages: list[dict[str, str]]) -> None:
    expected: Any = render_jinja_template([messages], chat_template=TEMPLATES[name], add_generation_prompt=True, **TOKENS)
    assert ChatTemplate(TEMPLATES[name], TOKENS).render(messages) == expected[0][0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('not like this') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
    ],
)
def test_refusals_and_escapes_are_template_errors(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render([])


@pytest.mark.parametrize(
    ("config", "jinja", "expected"),
    [
        ({"chat_template": "A{{ eos_token }}", "eos_token": "E"}, None, "AE"),
        ({"chat_template": "A{{ eos_token }}", "eos_token": {"content": "O"}}, None, "AO"),
        ({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}, None, "D"),
        ({"chat_template": "A"}, "B", "B"),
        ({}, None, None),
    ],
)
def test_found_where_models_keep_it(tmp_path: Path, config: dict[str, Any], jinja: str | None, expected: str | None) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    found = find_template(tmp_path)
    assert (found.render([]) if found else None) == expected


@pytest.mark.parametrize("config", ['{"chat_template": "{% if %}"}', "[]", "{", '{"chat_template": 3}'])
def test_a_broken_one_is_named(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelFilesError, match=str(tmp_path)):
        find_template(tmp_path)
