"""Configuration: one parse for every process, one environment prefix.

Each process has a frozen dataclass whose fields are its options. ``--pool-bytes 1GiB`` beats ``KVFERRY_POOL_BYTES``, which
beats the default. This is the only module that reads the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

from kvferry.errors import ConfigError
from kvferry.types import Role

__all__ = [
    "ENV_PREFIX",
    "BenchConfig",
    "DaemonConfig",
    "DemoConfig",
    "PathPolicy",
    "RouterConfig",
    "UpConfig",
    "WorkerConfig",
    "parse",
    "parse_size",
    "to_arguments",
]

ENV_PREFIX = "KVFERRY_"

C = TypeVar("C")


class PathPolicy(Enum):
    """Which path a daemon may use to a peer. ``AUTO`` takes shm on the same machine, else tcp, and reports which."""

    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"


def option(default: Any, help_text: str, parser: Callable[[str], Any] | None = None) -> Any:
    """A dataclass field that is also a flag and a variable. ``dataclasses.MISSING`` as default makes it required."""
    return dataclasses.field(default=default, metadata={"help": help_text, "parser": parser})


def parse_size(text: str) -> int:
    """Bytes from "1GiB", "512MiB", "64k", "4096". Raises ValueError on anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*", text.lower())
    if not match:
        raise ValueError(f"not a size: {text!r}; write for example 512MiB or 2GiB")
    number, unit, suffix = match.groups()
    base = 1000 if suffix == "b" and unit else 1024
    return int(float(number) * base ** " kmgt".index(unit or " "))


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvferry"


def _path(text: str) -> Path:
    return Path(text).expanduser()


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Options every process has."""

    log_level: str = option("info", "debug, info, warning or error")
    die_with_parent: bool = option(False, "end when the process that started this one ends (set by kvferry up)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig(Common):
    """``kvferry daemon``"""

    node: str = option(dataclasses.MISSING, "name of this daemon and its worker in the cluster")
    socket_dir: Path = option(dataclasses.MISSING, "directory for the unix sockets that the worker and local peers use", _path)
    directory: str = option(dataclasses.MISSING, "where nodes are announced: unix:PATH or HOST:PORT of a router, or redis://…")
    listen: str = option("127.0.0.1:0", "HOST:PORT of the control API for routers; port 0 takes a free one")
    advertise: str = option("", "HOST:PORT under which routers reach the control API, where it differs from --listen")
    data_listen: str = option("127.0.0.1:0", "HOST:PORT on which peers deliver pages by TCP; port 0 takes a free one")
    data_advertise: str = option("", "HOST:PORT under which peers reach the data port, where it differs from --data-listen")
    pool_bytes: int = option(parse_size("1GiB"), "size of the shared-memory arena, for example 512MiB", parse_size)
    arena_dir: Path | None = option(
        None, "take the arena from a file on this mount (hugetlbfs, /dev/shm) instead of anonymous shared memory", _path
    )
    path: PathPolicy = option(PathPolicy.AUTO, "how pages leave: auto, shm or tcp; shm and tcp refuse anything else")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(Common):
    """``kvferry worker``"""

    role: Role = option(dataclasses.MISSING, "prefill, decode or both")
    model: str = option("smollm2", "a Hugging Face model directory, or smollm2")
    socket_dir: Path = option(dataclasses.MISSING, "the --socket-dir of the daemon beside this worker", _path)
    listen: str = option("127.0.0.1:0", "HOST:PORT of the worker's own service for routers; port 0 takes a free one")
    advertise: str = option("", "HOST:PORT under which routers reach it, where it differs from --listen")
    threads: int = option(1, "torch threads; more than one is slower on a machine of two cores")
    dtype: str = option("float32", "float64, float32, float16 or bfloat16")
    block_tokens: int = option(16, "tokens a KV block")
    # A step of SmolLM2 on one core takes about 1.1 s at 256 tokens and 2.3 s at 512, and others wait for it.
    chunk_tokens: int = option(256, "most prompt tokens computed in one step")
    max_sequences: int = option(64, "most sequences in one step")
    context: int = option(0, "most tokens a sequence may have; 0 takes the model's own limit")
    cache_dir: Path = option(_cache_dir(), "where converted models are kept", _path)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(Common):
    """``kvferry router``"""

    host: str = option("127.0.0.1", "address of the HTTP front")
    port: int = option(8000, "port of the HTTP front")
    directory: str = option("embedded", "embedded, or redis://… shared by several routers")
    directory_listen: str = option("127.0.0.1:0", "where the embedded directory takes announcements: unix:PATH or HOST:PORT")
    request_timeout: float = option(120.0, "seconds a request may take in all, its deadline")
    max_body_bytes: int = option(parse_size("8MiB"), "largest request body", parse_size)
    max_requests: int = option(256, "requests served at once; one more gets 429")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig(Common):
    """``kvferry up``"""

    model: str = option("smollm2", "a Hugging Face model directory, or smollm2")
    prefill: int = option(1, "prefill workers, each with its daemon")
    decode: int = option(1, "decode workers, each with its daemon")
    host: str = option("127.0.0.1", "address of the HTTP front")
    port: int = option(8000, "port of the HTTP front; 0 takes a free one")
    path: PathPolicy = option(PathPolicy.AUTO, "how pages travel: auto, shm or tcp")
    pool_bytes: int = option(parse_size("1GiB"), "shared-memory arena of each daemon", parse_size)
    arena_dir: Path | None = option(None, "mount to take the arenas from instead of anonymous shared memory", _path)
    prefill_block_tokens: int = option(16, "tokens a KV block on prefill workers")
    decode_block_tokens: int = option(16, "tokens a KV block on decode workers")
    chunk_tokens: int = option(256, "most prompt tokens a prefill worker computes in one step")
    dtype: str = option("float32", "float64, float32, float16 or bfloat16")
    context: int = option(0, "most tokens a sequence may have; 0 takes the model's own limit")
    request_timeout: float = option(120.0, "seconds a request may take in all, its deadline")
    cache_dir: Path = option(_cache_dir(), "where converted models are kept", _path)
    run_dir: Path | None = option(None, "directory for sockets and logs; by default a fresh one, removed at the end", _path)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig(UpConfig):
    """``kvferry demo``"""

    port: int = option(0, "port of the HTTP front; 0 takes a free one")
    json: bool = option(False, "print the table as JSON")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(parse_size(part) for part in text.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig(Common):
    """``kvferry bench transfer``"""

    sizes: tuple[int, ...] = option((4096, 65536, 1 << 20), "page sizes, for example 4KiB,64KiB,1MiB", _sizes)
    total: int = option(parse_size("64MiB"), "bytes a transfer", parse_size)
    rounds: int = option(5, "rounds, each with one transfer of every size by every path")
    json: bool = option(False, "print rows as JSON")


def parse(cls: type[C], argv: Sequence[str], environ: Mapping[str, str] | None = None, *, prog: str, examples: str = "") -> C:
    """Build ``cls`` from flags, variables and defaults.

    Raises ConfigError naming the flag or variable; ``--help`` prints and exits as argparse does.
    """
    environ = os.environ if environ is None else environ
    description = (cls.__doc__ or "").strip()
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    fields = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for field in fields:
        _add_flag(parser, field, hints[field.name])
    given = vars(parser.parse_args(list(argv)))
    values: dict[str, Any] = {}
    for field in fields:
        variable = ENV_PREFIX + field.name.upper()
        if given[field.name] is not None:
            values[field.name] = _convert(field, hints[field.name], given[field.name], _flag(field.name))
        elif environ.get(variable):
            values[field.name] = _convert(field, hints[field.name], environ[variable], variable)
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{prog} needs {_flag(field.name)}", why=_help(field), hint=f"set it or {variable}")
    return cls(**values)


def to_arguments(config: object) -> list[str]:
    """The flags that make :func:`parse` build an equal config in another process; defaults are left out."""
    arguments = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if value == field.default:
            continue
        text = str(value.value) if isinstance(value, Enum) else str(value).lower() if isinstance(value, bool) else str(value)
        arguments.append(f"{_flag(field.name)}={text}")
    return arguments


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata["help"])


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> None:
    required = field.default is dataclasses.MISSING
    default = field.default.value if isinstance(field.default, Enum) else field.default
    text = _help(field) + (" (required)" if required else "" if default in (None, "", False) else f" (default: {default})")
    if hint is bool:
        parser.add_argument(_flag(field.name), nargs="?", const="true", metavar="BOOL", help=text)
    else:
        parser.add_argument(_flag(field.name), metavar=field.name.rsplit("_", 1)[-1].upper(), help=text)


def _convert(field: dataclasses.Field[Any], hint: Any, text: str, source: str) -> Any:
    convert = field.metadata["parser"] or _bare(hint)
    try:
        return _boolean(text) if convert is bool else convert(text)
    except ValueError as error:
        allowed = ", ".join(str(m.value) for m in convert) if isinstance(convert, type) and issubclass(convert, Enum) else ""
        raise ConfigError(
            f"{source} cannot be {text!r}", why=f"one of: {allowed}" if allowed else str(error), hint=_help(field)
        ) from error


def _bare(hint: Any) -> Any:
    if isinstance(hint, UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not NoneType)
    return hint


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise ValueError("true or false")
