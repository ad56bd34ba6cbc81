"""A process that is not to outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from kvferry.errors import PeerUnavailableError, Stage, Where

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on the kernel sends this process SIGTERM when the thread that started it ends.

    Raises PeerUnavailableError where the parent is gone already: its end came before the kernel knew what to do.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if _is_orphan(os.getppid()):
        raise PeerUnavailableError(
            "the process that started this one has ended", where=Where(stage=Stage.START), hint="Leave --die-with-parent out."
        )


def _is_orphan(parent: int) -> bool:
    """Whether init took this process over. In a container init may be our true parent: then it is a Python as we are."""
    if parent != 1:
        return False
    try:
        return Path("/proc/1/exe").readlink() != Path("/proc/self/exe").readlink()
    except OSError:  # init belongs to another user, so it did not start us
        return True
