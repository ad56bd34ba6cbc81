"""How much memory this machine, or the container around us, can still give: asked before an arena is taken.

A process that takes more is not refused by the kernel but killed by it, so the question has to come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Available", "HugePages", "available_memory", "free_huge_pages"]


@dataclass(frozen=True, slots=True)
class Available:
    """``size`` bytes can still be taken; ``limit`` names what sets that bound."""

    size: int
    limit: str


@dataclass(frozen=True, slots=True)
class HugePages:
    """Huge pages of the default size that nobody has taken or reserved."""

    page_bytes: int
    free: int


def available_memory(root: Path = Path("/")) -> Available:
    """The smallest of the machine's MemAvailable and what each enclosing memory cgroup (v1 or v2) still allows.

    ``root`` is where ``proc`` and ``sys`` are found.
    """
    bounds = [Available(_meminfo(root).get("MemAvailable", 0), "the machine's available memory")]
    for directory, maximum, usage in _cgroup_files(root):
        found = _room(directory, maximum, usage)
        if found is not None:
            bounds.append(Available(found, f"the memory cgroup {directory}"))
    return min(bounds, key=lambda bound: bound.size)


def free_huge_pages(root: Path = Path("/")) -> HugePages:
    """What the default huge page pool can still give; ``free`` is 0 where there is none."""
    info = _meminfo(root)
    return HugePages(info.get("Hugepagesize", 0), max(0, info.get("HugePages_Free", 0) - info.get("HugePages_Rsvd", 0)))


def _meminfo(root: Path) -> dict[str, int]:
    values = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        values[name] = int(number) * (1024 if unit == "kB" else 1)
    return values


def _cgroup_files(root: Path) -> list[tuple[Path, str, str]]:
    """(directory, name of the limit's file, name of the usage's file) of each enclosing memory cgroup, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [(d, "memory.max", "memory.current") for d in _ancestors(root / "sys/fs/cgroup", path)]
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            found += [(d, "memory.limit_in_bytes", "memory.usage_in_bytes") for d in _ancestors(mount, path)]
    return found


def _ancestors(mount: Path, path: str) -> list[Path]:
    """``mount/path`` and its parents up to ``mount``. In a container the path may name a place outside the mount."""
    inner = mount / path.lstrip("/")
    return [inner, *(parent for parent in inner.parents if parent.is_relative_to(mount))]


def _room(directory: Path, maximum: str, usage: str) -> int | None:
    """Bytes below the limit, page cache that the kernel would give up counted as free; None without a limit."""
    try:
        limit = int((directory / maximum).read_text())
        used = int((directory / usage).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such cgroup, or the limit is "max"
        return None
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return max(0, limit - used + reclaimable)
