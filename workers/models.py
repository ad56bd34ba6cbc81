"""Which model to run: from the name a user gives to a directory, from a directory to a loaded model and its fingerprint.

Everything works by plain path; nothing here reaches for a network. Torch and transformers, seconds to import, are needed
by :func:`load_model` alone, so a supervisor can resolve a model without them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress
from safetensors import SafetensorError, safe_open

from kvferry.errors import KvferryError, ModelFilesError
from kvferry.keys import Fingerprint
from kvferry.workers import smollm2

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["SMOLLM2", "LoadedModel", "conversion_bar", "fingerprint", "load_model", "resolve_model"]

SMOLLM2 = "smollm2"
"""The one model that has a name; every other is a directory."""

_DIRECTORY_HINT = f"Pass a Hugging Face model directory, or {SMOLLM2}; nothing is downloaded by name"
_WHOLE_HINT = "Copy the model directory again, whole"

# Keys of config.json that leave the KV of a prompt as it is. Any key not named here counts as one that changes it.
_NOT_SEMANTIC = frozenset(
    {"_name_or_path", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype", "transformers_version", "use_cache"}
)
# Without these there is no KV cache of heads and positions to page.
_NEEDED = ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
_SAMPLES = 8
_SAMPLE_BYTES = 512


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM ready to run, and what the engine needs to know of it.

    model: in eval mode, attention by the name given; layers: attention layers; heads, kv_heads: query and KV heads a
    layer; head_dim: elements a head; context: most positions; eos_token_ids: each one ends a generation; name: of the
    directory.
    """

    model: PreTrainedModel
    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    eos_token_ids: frozenset[int]


def resolve_model(name_or_dir: str, cache_dir: Path, progress: smollm2.Progress | None = None) -> Path:
    """The Hugging Face directory that ``--model`` means, checked to be whole; ``smollm2`` is converted if need be.

    Raises ModelFilesError where the directory or the package is missing, incomplete, or not a causal LM in safetensors,
    ConfigError where the cache cannot be written.
    """
    if name_or_dir == SMOLLM2:
        return smollm2.convert(cache_dir, progress)
    path = Path(name_or_dir).expanduser()
    if not path.is_dir():
        why = "it is a file" if path.exists() else "no such directory"
        raise ModelFilesError(f"cannot use the model {name_or_dir}", why=why, hint=_DIRECTORY_HINT)
    architecture = _architecture(_read_config(path))
    if not architecture.endswith("ForCausalLM"):
        raise ModelFilesError(
            f"cannot use the model in {path}", why=f"it is a {architecture}", hint="kvferry serves causal language models"
        )
    for shard in _shards(path):
        _check_shard(shard)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ModelFilesError(f"cannot use the model in {path}", why="tokenizer.json is missing", hint=_WHOLE_HINT)
    return path


def load_model(path: Path, dtype: torch.dtype, attention: str, threads: int) -> LoadedModel:
    """Load the model of a resolved directory on the CPU, quietly and from its files alone.

    attention: a name in transformers' attention-function registry; threads: for torch, in this whole process.

    Raises ModelFilesError where transformers cannot build it or the weights do not fill it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(threads)
    try:
        with _quiet_transformers():
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported in info, and refused below in one line
                output_loading_info=True,
            )
    except Exception as error:
        # The edge between a user's files and a library that meets them with any kind of exception.
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ModelFilesError(f"cannot load the model in {path}", why=why, hint=_WHOLE_HINT) from error
    model, info = loaded
    _refuse_partial_weights(path, info)
    return _describe(model.eval(), path.name)


def fingerprint(path: Path, dtype: torch.dtype) -> Fingerprint:
    """What must agree for KV computed with the model in ``path`` to be reusable.

    ``revision`` digests config.json (keys that do not change KV left out; sliding windows and layer kinds are in) and
    the weights. A full hash would read every byte, so the weights count by each shard's length and safetensors header
    (names, shapes, dtypes) and, for every tensor, eight evenly spaced samples of 512 bytes, first and last bytes among
    them. Training changes nearly every weight, so two trainings differ; an edit between the samples would go unseen. The
    same weights cut into other shards differ too, which costs reuse, never correctness.

    Raises ModelFilesError as :func:`resolve_model` does.
    """
    config = _read_config(path)
    semantic = {key: value for key, value in config.items() if key not in _NOT_SEMANTIC}
    state = hashlib.blake2b(_canonical(semantic).encode(), digest_size=16)
    for shard in _shards(path):
        _check_shard(shard)
        state.update(_sampled(shard))
    quantization = config.get("quantization_config")
    return Fingerprint(
        model=_architecture(config),
        revision=state.hexdigest(),
        dtype=str(dtype).removeprefix("torch."),
        quantization=str(quantization.get("quant_method")) if isinstance(quantization, dict) else "none",
        rope=_canonical(_rope(config)),
    )


@contextmanager
def conversion_bar() -> Iterator[smollm2.Progress]:
    """A progress bar on standard error for :func:`resolve_model`; nothing is shown unless something is converted."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tensors"))
    bar = RichProgress(*columns, console=console, transient=console.is_terminal)

    def report(done: int, total: int) -> None:
        if not bar.tasks:
            bar.add_task("Converting SmolLM2-135M-Instruct, once")
            bar.start()
        bar.update(bar.tasks[0].id, completed=done, total=total or None)

    try:
        yield report
    except KvferryError:
        bar.live.transient = True  # the error's line is to stand alone
        raise
    finally:
        if bar.tasks:
            bar.stop()


# --- the directory's files --------------------------------------------------------------------------------------------


def _read_config(path: Path) -> dict[str, Any]:
    return _read_json(path, "config.json")


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((path / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFilesError(f"cannot use the model in {path}", why=f"{name}: {error.strerror}", hint=_DIRECTORY_HINT) from error
    except ValueError as error:
        raise ModelFilesError(f"cannot use the model in {path}", why=f"{name} is not JSON: {error}", hint=_WHOLE_HINT) from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"cannot use the model in {path}", why=f"{name} is not a JSON object", hint=_WHOLE_HINT)
    return value


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else "model of no named architecture"


def _shards(path: Path) -> list[Path]:
    """The safetensors files that hold the weights, as transformers chooses them: the whole file, else those of the index."""
    whole = path / "model.safetensors"
    if whole.is_file():
        return [whole]
    if not (path / "model.safetensors.index.json").is_file():
        raise ModelFilesError(
            f"cannot use the model in {path}", why="it has no model.safetensors", hint="kvferry reads weights in safetensors only"
        )
    index = _read_json(path, "model.safetensors.index.json").get("weight_map")
    names = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise ModelFilesError(
            f"cannot use the model in {path}", why="model.safetensors.index.json names no shards", hint=_WHOLE_HINT
        )
    return [path / name for name in names]


def _check_shard(shard: Path) -> None:
    """Raises ModelFilesError unless the header is sound and the file as long as it says."""
    try:
        with safe_open(shard, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        why = f"{shard.name} is missing" if isinstance(error, FileNotFoundError) else f"{shard.name}: {error}"
        raise ModelFilesError(f"cannot use the model in {shard.parent}", why=why, hint=_WHOLE_HINT) from error


def _sampled(shard: Path) -> bytes:
    """Digest of a checked shard: length, header, and samples of every tensor.

    Format: 8 bytes little-endian header length, JSON header, then the data that its ``data_offsets`` count into.
    """
    state = hashlib.blake2b(shard.stat().st_size.to_bytes(8, "little"), digest_size=32)
    with shard.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        data = file.tell()
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        state.update(_canonical(tensors).encode())
        for start, end in sorted(entry["data_offsets"] for entry in tensors.values()):
            for offset in _sample_offsets(end - start):
                file.seek(data + start + offset)
                state.update(file.read(min(_SAMPLE_BYTES, end - start - offset)))
    return state.digest()


def _sample_offsets(length: int) -> list[int]:
    """Offsets of the samples in a tensor of ``length`` bytes, from its first byte to the last ``_SAMPLE_BYTES``."""
    last = max(0, length - _SAMPLE_BYTES)
    return sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)})


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters in one form, whether config.json has ``rope_parameters`` or, older, theta and scaling apart."""
    rope: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            rope.setdefault(key, config[key])
    return {"rope_type": "default", **rope}


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


# --- the loaded model -------------------------------------------------------------------------------------------------


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' own bars and warnings off a worker's log; what matters in them is checked here."""
    from transformers import utils

    logging: Any = utils.logging  # partly untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _refuse_partial_weights(path: Path, info: Mapping[str, Any]) -> None:
    """transformers fills missing tensors with random numbers and goes on: here that is an error."""
    for kind, problem in (("missing_keys", "lack"), ("mismatched_keys", "have in another shape")):
        names = sorted(str(key if isinstance(key, str) else key[0]) for key in info[kind])
        if names:
            raise ModelFilesError(
                f"cannot load the model in {path}",
                why=f"the weights {problem} {len(names)} of its tensors, {names[0]} for one",
                hint="config.json and the weights are not of the same model. " + _WHOLE_HINT,
            )


def _describe(model: PreTrainedModel, name: str) -> LoadedModel:
    config: PretrainedConfig = model.config
    lacking = [field for field in _NEEDED if not isinstance(getattr(config, field, None), int)]
    if lacking:
        raise ModelFilesError(
            f"cannot serve the model {name}",
            why=f"a {type(model).__name__} has no {', '.join(lacking)}",
            hint="Models of the kind of Llama, Qwen3 and Mistral work.",
        )
    heads = int(config.num_attention_heads)
    return LoadedModel(
        model=model,
        name=name,
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab_size=int(config.vocab_size),
        context=int(config.max_position_embeddings),
        eos_token_ids=_eos_token_ids(model),
    )


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """From generation_config.json, where chat models name every end of turn; else from config.json."""
    generation = model.generation_config
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = model.config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids) if isinstance(ids, list) else frozenset({int(ids)})
