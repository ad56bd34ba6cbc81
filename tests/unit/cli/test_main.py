"""The command line's edges: help, unknown commands, one line and the right status for a mistake."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry import __version__
from kvferry.cli import main
from kvferry.cli.status import exit_status
from kvferry.errors import ConfigError, InternalError, MemoryUnavailableError


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2), (["up", "--help"], 0), (["worker", "--help"], 0)])
def test_help_names_the_flags_or_commands(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        ended: object = main(arguments)
    except SystemExit as end:  # how argparse leaves after --help
        ended = end.code
    assert ended == status
    shown = capsys.readouterr().out
    assert "usage: kvferry" in shown
    assert "--model" in shown or "up" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvferry {__version__}\n"


@pytest.mark.parametrize("arguments", [["fly"], ["up", "--prefill=0"], ["daemon"], ["up", "--dtype=int8", "--model=/nowhere"]])
def test_a_mistake_is_one_line_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.err.startswith("kvferry: ")


@pytest.mark.parametrize(("absent", "named"), [("uvicorn", True), ("kvferry.router.main", False)])
def test_a_missing_extra_is_named(absent: str, named: bool) -> None:
    """A module of ours that is missing is a defect, and shows as one. In a process of its own: imports would stay broken."""
    script = f"import sys; sys.modules[{absent!r}] = None; from kvferry.cli import main; sys.exit(main(['router']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ("pip install 'kvferry[router]'" in done.stderr) is named
    assert ("Traceback" in done.stderr) is not named
    assert done.returncode == (2 if named else 1)


def test_status_by_kind_of_error() -> None:
    assert exit_status(ConfigError("x")) == exit_status(MemoryUnavailableError("x")) == 2
    assert exit_status(InternalError("x")) == 1
