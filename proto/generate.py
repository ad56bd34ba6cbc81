"""Writes the Python modules and type stubs of this folder's .proto files beside them.

Run from anywhere as a script, by the interpreter of an environment with `requirements.txt`:

    python proto/generate.py            write *_pb2.py, *_pb2_grpc.py and their stubs, delete those of no source
    python proto/generate.py --check    write nothing; exit 1 and name the files that differ from their source

A source's import path is `kvferry/proto/<name>.proto`, so the generated imports read `kvferry.proto.<name>_pb2`.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["main"]

FOLDER = Path(__file__).resolve().parent
PACKAGE_PATH = Path("kvferry/proto")
GENERATED = re.compile(r".*_pb2(_grpc)?\.pyi?")
SERVICE = re.compile(r"^service\s", re.MULTILINE)


def _protoc(out: Path, options: list[str], sources: list[Path]) -> None:
    plugins = [f"--plugin={name}={Path(sys.executable).with_name(name)}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    paths = [str(PACKAGE_PATH / source.name) for source in sources]
    command = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=.", *plugins]
    subprocess.run([*command, *(option.format(out=out) for option in options), *paths], cwd=FOLDER.parent, check=True)


def _generate() -> dict[str, bytes]:
    """Returns the content of every generated file by its name."""
    sources = sorted(FOLDER.glob("*.proto"))
    services = [source for source in sources if SERVICE.search(source.read_text())]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if sources:
            _protoc(out, ["--python_out={out}", "--mypy_out=quiet:{out}"], sources)
        if services:
            _protoc(out, ["--grpc_python_out={out}", "--mypy_grpc_out=quiet,only_async:{out}"], services)
        return {path.name: path.read_bytes() for path in (out / PACKAGE_PATH).glob("*")}


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the protobuf modules of kvferry.proto")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 where a file differs from its source")
    check = parser.parse_args().check
    wanted = _generate()
    present = {path.name: path.read_bytes() for path in FOLDER.iterdir() if GENERATED.fullmatch(path.name)}
    changed = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
    if check:
        for name in changed:
            print(f"proto/{name} differs from its source: run `make proto`", file=sys.stderr)
        return 1 if changed else 0
    for name in changed:
        if name in wanted:
            (FOLDER / name).write_bytes(wanted[name])
        else:
            (FOLDER / name).unlink()
        print(f"proto/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
