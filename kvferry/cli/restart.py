"""When a supervised process that ended is started again. Pure: the times are arguments."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.cli.status import EXIT_USER

__all__ = ["GiveUp", "RestartAfter", "RestartPolicy"]

_FIRST_SECONDS = 0.5
_LONGEST_SECONDS = 10.0
# A process that lived this long had started well: its end is a new trouble, not the old one again.
_SETTLED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RestartAfter:
    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Starting it again would end the same way."""


class RestartPolicy:
    """One process's restarts: the delay doubles with each early death and starts over after a settled life."""

    def __init__(self) -> None:
        self._early_deaths = 0

    def ended(self, status: int, lived_seconds: float) -> RestartAfter | GiveUp:
        """``status`` as subprocess gives it: negative for a signal."""
        if status == EXIT_USER:
            return GiveUp()
        if lived_seconds >= _SETTLED_SECONDS:
            self._early_deaths = 0
        delay = min(_FIRST_SECONDS * 2**self._early_deaths, _LONGEST_SECONDS)
        self._early_deaths += 1
        return RestartAfter(delay)
