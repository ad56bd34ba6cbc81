"""The tree: every reason has one leaf, and a message says what, where, why and what to do."""

from __future__ import annotations

import re

import pytest

from kvferry import errors
from kvferry.errors import KvferryError, Reason, Stage, Where, error_class
from kvferry.types import Path


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_its_leaf(reason: Reason) -> None:
    assert error_class(reason).reason is reason


def test_the_drawn_tree_is_the_tree() -> None:
    drawn = re.findall(r"── (\w+Error)|^    (KvferryError)$", errors.__doc__ or "", re.MULTILINE)
    names = {name or root for name, root in drawn}
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, KvferryError)}
    assert names == classes


def test_a_message_says_it_all() -> None:
    where = Where(stage=Stage.HANDOFF, peer="decode-0@12ab", path=Path.TCP)
    error = errors.PeerUnavailableError("pages were not taken", where=where, why="connection closed", hint="Retry.")
    assert str(error) == "pages were not taken [stage=handoff peer=decode-0@12ab path=tcp]: connection closed. Retry."
    assert str(errors.InternalError("odd")) == "odd"
