"""What a kvferry process's exit status means. Pure."""

from __future__ import annotations

from kvferry.errors import KvferryError, MemoryUnavailableError, UserError

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_USER", "exit_status"]

EXIT_FAILED = 1
EXIT_USER = 2
"""The caller can mend it; trying again unchanged cannot help. argparse ends with the same status."""
EXIT_INTERRUPTED = 130


def exit_status(error: KvferryError) -> int:
    """The status of a process that ``error`` ended."""
    return EXIT_USER if isinstance(error, (UserError, MemoryUnavailableError)) else EXIT_FAILED
