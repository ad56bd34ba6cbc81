"""Writes the Python modules and type stubs of this folder's .proto files beside them.

Run from anywhere as a script, by the interpreter of an environment with `requirements.txt`:

    python proto/generate.py            write *_pb2.py and *_pb2.pyi, delete those without a source
    python proto/generate.py --check    write nothing; exit 1 and name the files that differ from their source

A source's import path is `kvferry/proto/<name>.proto`, so the generated imports read `kvferry.proto.<name>_pb2`. Messages
only: the services' stubs and handlers are built from the table of RPCs in `kvferry.proto.codec`.
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


def _generate() -> dict[str, bytes]:
    """Returns the content of every generated file by its name."""
    paths = [str(PACKAGE_PATH / source.name) for source in sorted(FOLDER.glob("*.proto"))]
    plugin = Path(sys.executable).with_name("protoc-gen-mypy")
    with tempfile.TemporaryDirectory() as out:
        options = ["--proto_path=.", f"--plugin={plugin}", f"--python_out={out}", f"--mypy_out=quiet:{out}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *paths], cwd=FOLDER.parent, check=True)
        return {path.name: path.read_bytes() for path in (Path(out) / PACKAGE_PATH).iterdir()}


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
