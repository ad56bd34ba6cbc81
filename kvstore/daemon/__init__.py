"""``kvferry daemon``: where store and engine meet. Owns the memory, serves routers and its worker, moves pages."""

from kvferry.kvstore.daemon.main import run

__all__ = ["run"]
