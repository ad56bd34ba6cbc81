"""Which models the paged attention takes, and which it refuses by name instead of computing something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from kvferry.errors import ModelFilesError
from kvferry.generation import SamplingParams
from kvferry.workers.models import LoadedModel
from kvferry.workers.paged_attention import ATTENTION, check_supported
from tests.unit.workers.engine_rig import Rig, generate

_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def loaded(config: PretrainedConfig, attention: str = ATTENTION, change: dict[str, int] | None = None) -> LoadedModel:
    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM.from_config  # untyped
    model = build(config, attn_implementation=attention).double().eval()
    described: dict[str, Any] = {
        "name": "tiny", "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab_size": 64, "context": 512,
        "eos_token_ids": frozenset(),
    }  # fmt: skip
    return LoadedModel(model=model, **(described | (change or {})))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**_SHAPE),
        Qwen3Config(**_SHAPE),
        MistralConfig(**_SHAPE, sliding_window=None),
        MistralConfig(**_SHAPE, sliding_window=5),
    ],
    ids=["llama", "qwen3", "mistral", "mistral-window"],
)
def test_models_that_are_taken_give_transformers_tokens(config: PretrainedConfig) -> None:
    check_supported(loaded(config))
    prompt = [(7 * i) % 61 for i in range(30)]
    rig = Rig(loaded(config), chunk_tokens=11)
    heard = rig.prefill("a", prompt, SamplingParams(top_logprobs=64))
    rig.run()
    plain = loaded(config, "sdpa")
    assert heard.ids == generate(plain, prompt, 1, eos=[-1])
    logprobs = plain.model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    found = {one.token_id: one.logprob for one in heard.tokens[0].top}
    assert found == pytest.approx(dict(enumerate(logprobs.tolist())), abs=1e-5)


def test_experts_do_not_matter_to_attention() -> None:
    model = loaded(Qwen3MoeConfig(**_SHAPE, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2))
    model.model.to(torch.float32)  # type: ignore[arg-type]  # torch multiplies groups in float32 at most
    check_supported(model)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Gemma2Config(**_SHAPE, sliding_window=4), "softcap"),
        (GptOssConfig(**_SHAPE, num_local_experts=2, sliding_window=4), "asks for s_aux"),
        (Llama4TextConfig(**_SHAPE, intermediate_size_mlp=32, num_local_experts=2), "chunked_attention"),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), r"these call kvferry_paged: \[\]"),
    ],
    ids=["score caps", "sinks", "chunked attention", "attention of its own"],
)
def test_what_would_be_computed_wrongly_is_refused(config: PretrainedConfig, why: str) -> None:
    with pytest.raises(ModelFilesError, match=why):
        check_supported(loaded(config))


@pytest.mark.parametrize(
    ("change", "why"),
    [({"layers": 3}, "of 3 layers"), ({"kv_heads": 1}, "layer 0 attends"), ({"head_dim": 16}, "layer 0 attends")],
)
def test_a_description_that_is_not_the_models_is_refused(change: dict[str, int], why: str) -> None:
    with pytest.raises(ModelFilesError, match=why):
        check_supported(loaded(LlamaConfig(**_SHAPE), change=change))


def test_another_attention_is_noticed() -> None:
    with pytest.raises(ModelFilesError, match=ATTENTION):
        check_supported(loaded(LlamaConfig(**_SHAPE), "sdpa"))


def test_a_window_the_attention_is_not_told_of_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(LlamaConfig(**_SHAPE))
    monkeypatch.setattr(model.model.config, "sliding_window", 9, raising=False)
    with pytest.raises(ModelFilesError, match="sliding window"):
        check_supported(model)


def test_outside_a_step_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="only in a step"):
        loaded(LlamaConfig(**_SHAPE)).model(input_ids=torch.zeros(1, 2, dtype=torch.int64))
