"""What lasts for as long as the arena holds pages of one layout and model: the store, and the threads that move its bytes.

It outlives the worker: one that comes back with the same layout and model finds its cached blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.keys import Fingerprint
from kvferry.kvstore.daemon.store import Store
from kvferry.layout import Layout
from kvferry.transfer.engine import Engine
from kvferry.transfer.receiver import Receiver

__all__ = ["PoolLife"]


@dataclass(frozen=True, slots=True)
class PoolLife:
    store: Store
    engine: Engine
    receiver: Receiver

    def serves(self, layout: Layout, fingerprint: Fingerprint) -> bool:
        """Whether a worker of this (sized) layout and fingerprint can use it."""
        return self.store.layout == layout and self.store.fingerprint == fingerprint

    def close(self) -> None:
        """Fail every hand-off, close every connection, end every thread. No byte of the arena is touched after this."""
        self.engine.close()
        self.receiver.close()
