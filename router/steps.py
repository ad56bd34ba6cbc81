"""What :mod:`kvferry.router.attempt` hears (events) and says (commands). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvferry.errors import KvferryError, Stage

__all__ = [
    "Blame",
    "CallerLeft",
    "Cancel",
    "Choose",
    "Chosen",
    "Closed",
    "Command",
    "DeadlinePassed",
    "Decoded",
    "Emit",
    "End",
    "Event",
    "Failed",
    "FirstToken",
    "Granted",
    "OpenGrant",
    "Part",
    "Reported",
    "Retry",
    "Revoke",
    "StartDecode",
    "StartPrefill",
    "StartTimer",
    "TimerFired",
]


class Part(Enum):
    """The parts of an attempt that run on their own and can fail."""

    CHOICE = "choice"
    GRANT = "grant"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def stage(self) -> Stage:
        return _STAGES[self]


_STAGES = {Part.CHOICE: Stage.ADMISSION, Part.GRANT: Stage.GRANT, Part.PREFILL: Stage.PREFILL, Part.DECODE: Stage.DECODE}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A pair is there."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The decode side reserved blocks."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Prefill's token; ``last``: the answer ends with it."""

    last: bool


@dataclass(frozen=True, slots=True)
class Decoded:
    """Another token, from decode; ``last``: the answer ends with it."""

    last: bool


@dataclass(frozen=True, slots=True)
class Reported:
    """Prefill reported the hand-off."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A stream ended without an error."""

    part: Part


@dataclass(frozen=True, slots=True)
class Failed:
    part: Part
    error: KvferryError


@dataclass(frozen=True, slots=True)
class TimerFired:
    pass


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


@dataclass(frozen=True, slots=True)
class CallerLeft:
    """The client is gone, or takes no more."""


Event = Chosen | Granted | FirstToken | Decoded | Reported | Closed | Failed | TimerFired | DeadlinePassed | CallerLeft


@dataclass(frozen=True, slots=True)
class Choose:
    """Find a pair; the answer is Chosen or Failed."""


@dataclass(frozen=True, slots=True)
class OpenGrant:
    pass


@dataclass(frozen=True, slots=True)
class StartPrefill:
    pass


@dataclass(frozen=True, slots=True)
class StartDecode:
    pass


@dataclass(frozen=True, slots=True)
class Emit:
    """Give the token that has just come to the client."""


@dataclass(frozen=True, slots=True)
class Cancel:
    part: Part


@dataclass(frozen=True, slots=True)
class Revoke:
    """Take the grant back: decode has not taken it over."""

    why: str


@dataclass(frozen=True, slots=True)
class Blame:
    """This part's node failed; let others be warned."""

    part: Part
    error: KvferryError


@dataclass(frozen=True, slots=True)
class Retry:
    """Forget this attempt's tokens; another attempt follows."""

    part: Part
    error: KvferryError


@dataclass(frozen=True, slots=True)
class StartTimer:
    seconds: float


@dataclass(frozen=True, slots=True)
class End:
    """The one terminal outcome; ``error`` None: the answer is whole."""

    error: KvferryError | None


Command = Choose | OpenGrant | StartPrefill | StartDecode | Emit | Cancel | Revoke | Blame | Retry | StartTimer | End
