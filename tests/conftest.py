"""What holds for every test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Shared machines stall for seconds, so the time of one example says nothing; pytest's timeout catches what hangs.
settings.register_profile("kvferry", deadline=None, print_blob=True)
settings.load_profile("kvferry")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A process that a test runs in this one sets logging up on a standard error that the test only lends it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
