"""Resolving, loading and fingerprinting a model directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from kvferry.errors import ModelFilesError
from kvferry.keys import fingerprint_differences
from kvferry.workers import models
from kvferry.workers.models import conversion_bar, fingerprint, load_model, resolve_model
from tests.tiny_models import EOS, KV_HEADS, VOCAB_SIZE, tiny_llama, tiny_qwen3

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[3]
F32 = torch.float32


@pytest.fixture
def tiny_directory(tmp_path: Path) -> Path:
    """A tiny Llama of the test's own, free to be damaged."""
    return tiny_llama(tmp_path / "tiny")


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", KV_HEADS)
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3])
def test_facts_of_a_loaded_model(tmp_path: Path, build: Callable[..., Path], kv_heads: int) -> None:
    directory = build(tmp_path / "tiny", 1, num_key_value_heads=kv_heads)
    loaded = load_model(resolve_model(str(directory), tmp_path), F32, "sdpa", threads=1)
    assert (loaded.name, loaded.layers, loaded.heads, loaded.kv_heads, loaded.head_dim) == ("tiny", 3, 4, kv_heads, 16)
    assert (loaded.vocab_size, loaded.context, loaded.eos_token_ids) == (VOCAB_SIZE, 1024, frozenset({EOS}))
    assert not loaded.model.training
    # The shapes as the weights themselves have them.
    shapes = {name: tuple(parameter.shape) for name, parameter in loaded.model.named_parameters()}
    assert shapes["model.layers.2.self_attn.k_proj.weight"] == (kv_heads * 16, 64)
    assert "model.layers.3.self_attn.k_proj.weight" not in shapes


def test_tiny_models_answer_every_prompt_differently(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny", 1)
    model: Any = load_model(directory, F32, "sdpa", threads=1).model
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    answers = set()
    for prompt in ("Hello world", "Hello worle", "Jello world"):
        ids = torch.tensor([tokenizer.encode(prompt)])
        answers.add(tuple(model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()))
    assert len(answers) == 3
    assert min(len(set(answer)) for answer in answers) > 8


@given(st.text())
def test_tiny_tokenizer_is_one_token_a_byte(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    directory = tmp_path_factory.getbasetemp() / "tokenizer"
    if not directory.exists():
        tiny_llama(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_same_seed_same_weights(tmp_path: Path) -> None:
    first, second, other = (fingerprint(tiny_llama(tmp_path / str(i), seed), F32) for i, seed in enumerate((7, 7, 8)))
    assert first == second
    assert first != other


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_threads_and_attention_are_as_asked(tiny_directory: Path, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    try:
        loaded = load_model(tiny_directory, dtype, "eager", threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}
    assert loaded.model.config._attn_implementation == "eager"


def test_attention_of_our_own_is_called_in_every_layer(tiny_directory: Path) -> None:
    layers = []

    def ours(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **rest: Any) -> Any:
        layers.append(module.layer_idx)
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("kvferry_test", ours)
    model: Any = load_model(tiny_directory, F32, "kvferry_test", threads=1).model
    model(torch.tensor([[1, 2, 3]]))
    assert layers == [0, 1, 2]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([3, 5], 7, {3, 5}), (3, 7, {3}), (None, 7, {7}), (None, [7, 8], {7, 8}), (None, None, set())],
)
def test_end_tokens_come_from_the_generation_config_first(
    tiny_directory: Path, generation: Any, config: Any, expected: set[int]
) -> None:
    edit_config(tiny_directory, eos_token_id=config)
    path = tiny_directory / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": generation} if generation is not None else {}))
    assert load_model(tiny_directory, F32, "sdpa", threads=1).eos_token_ids == expected


def test_tied_embeddings_are_not_taken_for_missing_weights(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    weights: Any = load_model(directory, F32, "sdpa", threads=1).model
    assert weights.lm_head.weight is weights.model.embed_tokens.weight


def test_head_dim_may_be_left_to_follow_from_the_hidden_size(tiny_directory: Path) -> None:
    edit_config(tiny_directory, head_dim=None)
    assert load_model(tiny_directory, F32, "sdpa", threads=1).head_dim == 16


OFFLINE = """
import os, socket, sys
assert "HF_HUB_OFFLINE" not in os.environ
def refuse(*arguments, **named):
    raise AssertionError(f"network: {arguments}")
socket.socket.connect = socket.getaddrinfo = refuse
from pathlib import Path
from kvferry.workers import models
path = models.resolve_model(sys.argv[1], Path("/nonexistent"))
assert "torch" not in sys.modules and "transformers" not in sys.modules, "resolving must stay light"
import torch
loaded = models.load_model(path, torch.float32, "sdpa", 1)
models.fingerprint(path, torch.float32)
"""


def test_loading_is_silent_and_needs_no_network(tiny_directory: Path) -> None:
    # A relative name of the form owner/model is what a hub would be asked for.
    arguments = [sys.executable, "-W", "error", "-c", OFFLINE, f"{tiny_directory.parent.name}/{tiny_directory.name}"]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        arguments, cwd=tiny_directory.parent.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_transformers_may_speak_again_after_loading(tiny_directory: Path) -> None:
    from transformers.utils import logging

    state: Any = logging
    before = (state.get_verbosity(), state.is_progress_bar_enabled())
    load_model(tiny_directory, F32, "sdpa", threads=1)
    assert (state.get_verbosity(), state.is_progress_bar_enabled()) == before


# --- fingerprint ------------------------------------------------------------------------------------------------------


def changed_fields(ours: Path, theirs: Path) -> set[str]:
    return {difference.field for difference in fingerprint_differences(fingerprint(ours, F32), fingerprint(theirs, F32))}


def test_fingerprint_is_of_the_content_not_the_place(tiny_directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_directory, tmp_path / "elsewhere" / "other-name")
    assert changed_fields(tiny_directory, copy) == set()
    ours = fingerprint(tiny_directory, torch.bfloat16)
    assert (ours.model, ours.dtype, ours.quantization) == ("LlamaForCausalLM", "bfloat16", "none")


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"transformers_version": "9.9", "use_cache": False, "eos_token_id": 1, "_name_or_path": "x", "torch_dtype": "f"}, set()),
        ({"sliding_window": 128}, {"revision"}),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, {"revision"}),
        ({"rms_norm_eps": 1e-3}, {"revision"}),
        ({"a_key_of_tomorrow": True}, {"revision"}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"revision", "rope"}),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, {"revision", "rope"}),
        ({"quantization_config": {"quant_method": "awq"}}, {"revision", "quantization"}),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"revision", "model"}),
    ],
)
def test_fields_that_a_change_of_config_shows_in(
    tiny_directory: Path, tmp_path: Path, changes: dict[str, Any], fields: set[str]
) -> None:
    copy = shutil.copytree(tiny_directory, tmp_path / "copy")
    edit_config(copy, **changes)
    assert changed_fields(tiny_directory, copy) == fields


def test_rope_reads_alike_in_the_old_and_the_new_spelling() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0}
    new = models._rope({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert models._rope({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}) == new
    assert models._rope({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}) == new
    assert models._rope({"rope_theta": 1e4, "rope_scaling": None}) == {"rope_type": "default", "rope_theta": 1e4}


def test_training_any_tensor_shows_in_the_revision(tiny_directory: Path, tmp_path: Path) -> None:
    """Stands for a fine-tuning that leaves all but one tensor frozen: a small step of each weight of that tensor."""
    original: Any = AutoModelForCausalLM.from_pretrained(tiny_directory, local_files_only=True)
    for i, (name, parameter) in enumerate(original.named_parameters()):
        with torch.no_grad():
            parameter.add_(1e-3)
            original.save_pretrained(tmp_path / str(i))
            parameter.sub_(1e-3)
        assert changed_fields(tiny_directory, tmp_path / str(i)) == {"revision"}, name


@given(st.integers(0, 1 << 22))
def test_samples_cover_a_tensor_evenly(length: int) -> None:
    offsets = models._sample_offsets(length)
    width = models._SAMPLE_BYTES
    assert offsets[0] == 0
    assert offsets[-1] + width >= length
    assert all(0 <= offset <= max(0, length - width) for offset in offsets)
    gaps = [b - a for a, b in pairwise(offsets)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.fixture
def sharded(tiny_directory: Path, tmp_path: Path) -> Path:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_directory, local_files_only=True)
    directory = tmp_path / "sharded"
    model.save_pretrained(directory, max_shard_size="100KB")
    shutil.copy(tiny_directory / "tokenizer.json", directory)
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


def test_sharded_weights_load_and_every_shard_counts(sharded: Path, tiny_directory: Path, tmp_path: Path) -> None:
    loaded = load_model(resolve_model(str(sharded), tmp_path), F32, "sdpa", threads=1)
    whole = load_model(tiny_directory, F32, "sdpa", threads=1)
    for ours, theirs in zip(loaded.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for shard in sorted(sharded.glob("*.safetensors")):
        copy = shutil.copytree(sharded, tmp_path / f"copy-{shard.name}")
        with (copy / shard.name).open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))
        assert changed_fields(sharded, copy) == {"revision"}


# --- one clear line ---------------------------------------------------------------------------------------------------


def refused(directory: Path | str, *parts: str) -> None:
    """Resolving is refused in one line that names the directory and holds each of ``parts``."""
    with pytest.raises(ModelFilesError) as error:
        resolve_model(str(directory), Path("/nonexistent"))
    text = str(error.value)
    assert "\n" not in text
    assert error.value.hint
    for part in (str(directory), *parts):
        assert part in text


def test_what_is_no_model_directory(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such directory", "smollm2")
    refused("meta-llama/Llama-3.1-8B", "no such directory", "nothing is downloaded")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "it is a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "config.json", "No such file")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "no named architecture"),
        (b'{"architectures": ["BertForMaskedLM"]}', "BertForMaskedLM"),
    ],
)
def test_unusable_config(tiny_directory: Path, config: bytes, why: str) -> None:
    (tiny_directory / "config.json").write_bytes(config)
    refused(tiny_directory, why)


def test_weights_missing_or_damaged(tiny_directory: Path) -> None:
    weights = tiny_directory / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (b"", whole[:4], whole[:100], whole[:-1], whole + b"\0", b"\xff" * 64):
        weights.write_bytes(damaged)
        refused(tiny_directory, "model.safetensors", "whole")
        with pytest.raises(ModelFilesError):
            fingerprint(tiny_directory, F32)
    weights.rename(tiny_directory / "pytorch_model.bin")
    refused(tiny_directory, "no model.safetensors", "safetensors only")


def test_shard_missing(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, f"{shard.name} is missing")


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": "../model.safetensors"}}])
def test_unusable_index(sharded: Path, index: dict[str, Any]) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, "model.safetensors.index.json names no shards")


def test_tokenizer_missing(tiny_directory: Path) -> None:
    for path in tiny_directory.glob("tokenizer*"):
        path.unlink()
    refused(tiny_directory, "tokenizer.json is missing")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_hidden_layers": 4}, "the weights lack 9 of its tensors, model.layers.3."),
        ({"intermediate_size": 100}, "the weights have in another shape 9 of its tensors, model.layers.0.mlp."),
        ({"model_type": "of_tomorrow"}, "of_tomorrow"),
        ({"hidden_size": "wide"}, "Error"),
        ({"num_attention_heads": 0}, "Error"),
    ],
)
def test_config_and_weights_that_do_not_fit(tiny_directory: Path, changes: dict[str, Any], why: str) -> None:
    edit_config(tiny_directory, **changes)
    with pytest.raises(ModelFilesError) as error:
        load_model(tiny_directory, F32, "sdpa", threads=1)
    text = str(error.value)
    assert "\n" not in text
    assert str(tiny_directory) in text
    assert why in text


# --- progress ---------------------------------------------------------------------------------------------------------


def test_bar_shows_only_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    with conversion_bar():
        pass
    assert capsys.readouterr() == ("", "")
    with conversion_bar() as progress:
        for done in range(3):
            progress(done, 2 if done else 0)
    output, errors = capsys.readouterr()
    assert output == ""
    assert "Converting SmolLM2" in errors
    assert "2/2" in errors
