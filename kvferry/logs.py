"""Logging: one line an event, ``key=value`` fields, to standard error."""

from __future__ import annotations

import logging
import sys

from kvferry.errors import ConfigError

__all__ = ["set_up", "shown"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_up(process: str, level: str) -> None:
    """Send all records of this process to standard error under the name ``process``. Raises ConfigError on a bad level."""
    if level not in _LEVELS:
        raise ConfigError(f"log level {level!r} is unknown", hint="use one of " + ", ".join(_LEVELS))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {process} %(name)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])


def shown(**fields: object) -> str:
    """``request=r1 bytes=42`` from keyword arguments; None values are left out."""
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
