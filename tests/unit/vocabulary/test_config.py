"""One parse: flags beat variables beat defaults; every mistake names its source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import DaemonConfig, PathPolicy, UpConfig, parse, parse_size, to_arguments
from kvferry.errors import ConfigError

DAEMON = DaemonConfig(node="n", socket_dir=Path("/s"), directory="unix:/d")


def test_flags_beat_variables_beat_defaults() -> None:
    config = parse(UpConfig, ["--prefill", "2"], {"KVFERRY_PREFILL": "3", "KVFERRY_DECODE": "4"}, prog="kvferry up")
    assert (config.prefill, config.decode, config.port) == (2, 4, 8000)


@given(
    st.sampled_from(PathPolicy),
    st.integers(1, 2**50),
    st.one_of(st.none(), st.just(Path("/mnt/huge"))),
    st.booleans(),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1),
)
def test_arguments_rebuild_the_config(path: PathPolicy, size: int, arena: Path | None, lifeline: bool, node: str) -> None:
    config = replace(DAEMON, path=path, pool_bytes=size, arena_dir=arena, die_with_parent=lifeline, node=node)
    assert parse(DaemonConfig, to_arguments(config), {}, prog="kvferry daemon") == config


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1k", 1024),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1.5GiB", 3 << 29),
        ("2g", 2 << 30),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["--pool-bytes=lots"], {}, ["--pool-bytes", "lots"]),
        ([], {"KVFERRY_POOL_BYTES": "-1"}, ["KVFERRY_POOL_BYTES", "-1"]),
        (["--path=pigeon"], {}, ["--path", "auto, shm, tcp"]),
        (["--die-with-parent=perhaps"], {}, ["--die-with-parent", "perhaps"]),
    ],
)
def test_mistakes_name_their_source(arguments: list[str], variables: dict[str, str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(DaemonConfig, [*to_arguments(DAEMON), *arguments], variables, prog="kvferry daemon")
    for part in named:
        assert part in str(caught.value)


def test_a_required_option_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="--node"):
        parse(DaemonConfig, [], {}, prog="kvferry daemon")
