"""Telling the directory that this node is there, again and again: an entry that is not renewed vanishes by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from kvferry.errors import KvferryError
from kvferry.kvstore.directory import Directory
from kvferry.node import NodeInfo

__all__ = ["ANNOUNCE_SECONDS", "TTL_SECONDS", "Announcer"]

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 1.0
TTL_SECONDS = 3.0
_FIRST_RETRY_SECONDS = 0.1
_WITHDRAW_SECONDS = 0.5


class Announcer:
    """Announces what ``describe`` says: each second, and at once after :meth:`changed`.

    A directory that cannot be reached is logged once and tried for ever; serving does not depend on it.
    """

    def __init__(self, directory: Directory, describe: Callable[[], NodeInfo]) -> None:
        self._directory = directory
        self._describe = describe
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """The description is another now. Called in the event loop."""
        self._changed.set()

    async def run(self) -> None:
        """Announce until cancelled."""
        pause = ANNOUNCE_SECONDS
        failing = False
        while True:
            self._changed.clear()
            try:
                await self._directory.announce(self._describe(), TTL_SECONDS)
            except KvferryError as error:
                if not failing:
                    log.warning("cannot announce this node, trying on: %s", error)
                pause = min(ANNOUNCE_SECONDS, pause * 2 if failing else _FIRST_RETRY_SECONDS)
                failing = True
            else:
                if failing:
                    log.info("announced again")
                pause, failing = ANNOUNCE_SECONDS, False
            # Not wait_for: that of Python 3.11 loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()

    async def withdraw(self) -> None:
        """Take this node off the list. A directory that cannot be reached forgets it by itself."""
        try:
            async with asyncio.timeout(_WITHDRAW_SECONDS):
                await self._directory.withdraw(self._describe().address)
        except (KvferryError, TimeoutError) as error:
            log.info("not withdrawn, the entry will expire: %s", error)
