"""Arenas: what they reserve, how they are passed, how they refuse, and that nothing with a name stays behind."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvferry.errors import ConfigError, MemoryUnavailableError, PeerUnavailableError, ProtocolError
from kvferry.kvstore import arena as arena_module
from kvferry.kvstore.arena import Arena, ArenaKind, attach_arena, create_arena, send_arena
from kvferry.kvstore.machine_memory import Available, HugePages, available_memory, free_huge_pages

MIB = 1 << 20


def serve_once(path: Path, arena: Arena | None) -> threading.Thread:
    """Answer one client on ``path``: with the arena, or by closing."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def answer() -> None:
        client, _ = listener.accept()
        with client, listener:
            if arena is not None:
                send_arena(client, arena)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_both_ends_see_the_same_bytes(tmp_path: Path) -> None:
    ours = create_arena(MIB + 1, None)
    thread = serve_once(tmp_path / "memory.sock", ours)
    theirs = attach_arena(tmp_path / "memory.sock", ours.size, 5)
    thread.join()
    theirs.array[12345] = 77
    assert (ours.array[12345], ours.size % 4096, len(theirs.array)) == (77, 0, ours.size)
    assert ours.size >= MIB + 1
    theirs.close()
    ours.close()
    ours.close()


def test_memory_is_really_reserved_and_cannot_change_its_size() -> None:
    arena = create_arena(4 * MIB, None)
    assert os.fstat(arena.fd).st_blocks * 512 >= 4 * MIB, "the kernel counts the pages as allocated"
    for size in (0, arena.size - 4096, arena.size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    seals = fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    arena.close()


def test_closing_with_views_held_elsewhere_is_no_error() -> None:
    arena = create_arena(MIB, None)
    view = arena.array[:10]
    arena.close()
    view[0] = 1


def test_a_file_arena_has_no_name(tmp_path: Path) -> None:
    arena = create_arena(MIB, tmp_path)
    assert arena.kind is ArenaKind.FILE
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(arena.fd).st_nlink == 0
    arena.close()


def test_a_mount_without_unnamed_files_still_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def no_tmpfile(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", no_tmpfile)
    create_arena(MIB, tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_mount_too_small_is_named_with_both_sizes() -> None:
    room = os.statvfs("/dev/shm")
    asked = room.f_bavail * room.f_frsize + 64 * MIB
    with pytest.raises(MemoryUnavailableError, match=r"needs .* MiB in /dev/shm.*MiB are free.*--pool-bytes.*enlarge the mount"):
        create_arena(asked, Path("/dev/shm"))


def test_more_than_the_machine_has_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "available_memory", lambda: Available(3 * MIB, "the memory cgroup /x"))
    with pytest.raises(MemoryUnavailableError, match=r"needs 4\.0 MiB.*the memory cgroup /x allows 3\.0 MiB.*--pool-bytes"):
        create_arena(4 * MIB, None)
    create_arena(3 * MIB, None).close()


def test_where_memfd_is_forbidden_an_unnamed_file_in_dev_shm_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(name: str, flags: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    before = set(Path("/dev/shm").iterdir())
    monkeypatch.setattr(os, "memfd_create", forbidden)
    arena = create_arena(MIB, None)
    assert arena.kind is ArenaKind.FILE
    assert "memfd_create is not allowed here" in caplog.text
    named = {path for path in Path("/dev/shm").iterdir() if "kvferry" in path.name}
    assert named <= before
    arena.close()


def test_huge_pages_that_turn_out_to_be_missing_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "free_huge_pages", lambda: HugePages(2 * MIB, 1 << 40))
    monkeypatch.setattr(os, "memfd_create", partial(_no_huge, os.memfd_create))
    arena = create_arena(MIB, None)
    assert arena.kind is ArenaKind.MEMFD
    arena.close()


def _no_huge(make: Callable[[str, int], int], name: str, flags: int) -> int:
    if flags & os.MFD_HUGETLB:
        raise OSError(errno.ENOSYS, "no hugetlbfs")
    return make(name, flags)


@pytest.mark.parametrize("directory", ["/nowhere/at/all", "/proc"])
def test_a_directory_that_cannot_hold_it_is_a_configuration_error(directory: str) -> None:
    with pytest.raises((ConfigError, MemoryUnavailableError), match=directory):
        create_arena(MIB, Path(directory))


def test_attaching_to_nobody_or_to_a_refusal_is_typed(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailableError, match="cannot be reached"):
        attach_arena(tmp_path / "memory.sock", MIB, 1)
    thread = serve_once(tmp_path / "closed.sock", None)
    with pytest.raises(PeerUnavailableError, match="own user only"):
        attach_arena(tmp_path / "closed.sock", MIB, 1)
    thread.join()


def test_another_arena_than_announced_is_refused_and_its_descriptor_closed(tmp_path: Path) -> None:
    ours = create_arena(MIB, None)
    before = len(list(Path("/proc/self/fd").iterdir()))
    thread = serve_once(tmp_path / "memory.sock", ours)
    with pytest.raises(ProtocolError, match="expected 2097152"):
        attach_arena(tmp_path / "memory.sock", 2 * MIB, 5)
    thread.join()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    ours.close()


def machine(root: Path, available_kib: int, cgroup: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 9999 kB\nMemAvailable: {available_kib} kB\nHugePages_Free: 7\nHugePages_Rsvd: 2\nHugepagesize: 2048 kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)


def group(directory: Path, limit_name: str, limit: str, usage_name: str, usage: int, inactive_name: str, inactive: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / limit_name).write_text(limit + "\n")
    (directory / usage_name).write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon 5\n{inactive_name} {inactive}\n")


def test_the_tightest_of_machine_and_enclosing_cgroups_counts(tmp_path: Path) -> None:
    machine(tmp_path, 1000, "0::/a/b\n")
    assert available_memory(tmp_path) == Available(1000 * 1024, "the machine's available memory")
    mount = tmp_path / "sys/fs/cgroup"
    group(mount / "a/b", "memory.max", "max", "memory.current", 10, "inactive_file", 0)
    assert available_memory(tmp_path).size == 1000 * 1024
    group(mount / "a", "memory.max", "5000", "memory.current", 4000, "inactive_file", 300)
    assert available_memory(tmp_path) == Available(1300, f"the memory cgroup {mount / 'a'}")


def test_version_one_cgroups_count_too(tmp_path: Path) -> None:
    machine(tmp_path, 1000, "4:memory:/box\n0::/\n")
    mount = tmp_path / "sys/fs/cgroup/memory"
    group(mount, "memory.limit_in_bytes", "7000", "memory.usage_in_bytes", 7500, "total_inactive_file", 100)
    assert available_memory(tmp_path).size == 0


def test_free_huge_pages_leave_out_reserved_ones(tmp_path: Path) -> None:
    machine(tmp_path, 1, "")
    assert free_huge_pages(tmp_path) == HugePages(2048 * 1024, 5)
