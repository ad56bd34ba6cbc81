"""The benchmark runs, verifies what it moved, and prints what scripts read. Its figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys


def test_rows_as_json() -> None:
    flags = ["--sizes=4KiB,64KiB", "--total=2MiB", "--rounds=2", "--json"]
    command = [sys.executable, "-m", "kvferry.cli", "bench", "transfer", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    measured = (("kvferry", "shm"), ("kvferry", "tcp"), ("memcpy", "memory"))
    expected = {(impl, path, size) for impl, path in measured for size in (4096, 65536)}
    assert {(row["impl"], row["path"], row["size"]) for row in rows} == expected
    assert all(row["gbps"] > 0 and row["rounds"] == 2 and row["total"] == 2 << 20 for row in rows)


def test_sizes_that_do_not_fit_are_refused() -> None:
    command = [sys.executable, "-m", "kvferry.cli", "bench", "transfer", "--sizes=5000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--sizes" in done.stderr
