"""The living cluster as this router sees it: listings polled, pairs probed, load counted, pairs handed to requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

from kvferry.clock import Clock
from kvferry.errors import InvalidRequestError, KvferryError, NoWorkersError, Stage, Where
from kvferry.handoff import HandoffReport
from kvferry.kvstore.directory import Directory
from kvferry.logs import shown
from kvferry.metrics import Metrics
from kvferry.node import WorkerInfo
from kvferry.router.channels import Channels
from kvferry.router.members import Membership, Pair, PairState
from kvferry.router.policy import Chance, choose
from kvferry.types import NodeAddress

__all__ = ["Cluster", "Prober"]

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_PROBES_AT_ONCE = 4
# How long a request waits for workers that were there before: a worker is back 10 to 20 seconds after it died.
_ABSENCE_SECONDS = 60.0

Prober = Callable[[Pair], Awaitable[HandoffReport]]
"""Makes one real hand-off over a pair and returns its report, or raises the KvferryError that broke it."""


class Cluster:
    """Shell around :class:`Membership`. ``run`` keeps it up to date; the rest is called by requests in between."""

    def __init__(self, directory: Directory, channels: Channels, clock: Clock, chance: Chance, metrics: Metrics) -> None:
        self.members = Membership()
        self.directory_error: KvferryError | None = None
        self._directory = directory
        self._channels = channels
        self._clock = clock
        self._chance = chance
        self._metrics = metrics
        self._load: Counter[NodeAddress] = Counter()
        self._changed = asyncio.Event()
        self._probes: set[asyncio.Task[None]] = set()
        self._known: dict[NodeAddress, WorkerInfo | None] = {}

    async def run(self, probe: Prober) -> None:
        """Poll and probe until cancelled."""
        try:
            while True:
                await self._poll()
                for pair in self.members.take_due(self._clock.now(), _PROBES_AT_ONCE):
                    task = asyncio.create_task(self._probe(pair, probe))
                    self._probes.add(task)
                    task.add_done_callback(self._probes.discard)
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            for task in self._probes:
                task.cancel()
            await asyncio.gather(*self._probes, return_exceptions=True)

    async def choose(self, model: str, tokens: int, avoid: Collection[Pair], deadline: float) -> Pair:
        """A ready pair whose decode pool can hold ``tokens``, counted as loaded until :meth:`leave` is called for both nodes.

        Waits for workers that are away for the moment. Raises NoWorkersError, or InvalidRequestError where no pool, even
        empty, holds so many tokens.
        """
        give_up = min(deadline, self._clock.now() + _ABSENCE_SECONDS)
        while True:
            changed = self._changed
            pairs = self.members.ready(model)
            fitting = [pair for pair in pairs if _fits(pair, tokens)]
            if fitting:
                pair = choose(fitting, self._load, avoid, self._chance)
                self._load[pair.prefill.address] += 1
                self._load[pair.decode.address] += 1
                return pair
            if pairs:
                raise InvalidRequestError(
                    f"prompt: its KV needs {tokens} tokens of blocks, more than any decode worker's pool has",
                    hint="Shorten the prompt, or start daemons with a larger --pool-bytes.",
                    field="prompt",
                )
            left = give_up - self._clock.now()
            if left <= 0 or not self.members.has_served(model):
                raise NoWorkersError(
                    f"no pair of workers is ready for model {model}",
                    where=Where(stage=Stage.ADMISSION),
                    hint="See /ready for what each pair lacks, and retry.",
                )
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                continue

    def leave(self, address: NodeAddress) -> None:
        """A request is done with this node."""
        self._load[address] -= 1
        if self._load[address] <= 0:
            del self._load[address]

    def load(self, address: NodeAddress) -> int:
        return self._load[address]

    def node_failed(self, address: NodeAddress, error: KvferryError) -> None:
        """Take this life of a node out of service until a probe succeeds."""
        log.warning("node is suspect: %s", shown(node=address, error=error))
        self.members.call_failed(address, error, self._clock.now())

    def pair_failed(self, pair: Pair, error: KvferryError) -> None:
        """Take a pair out of service until a probe succeeds."""
        log.warning("pair is suspect: %s", shown(pair=pair, error=error))
        self.members.pair_failed(pair, error, self._clock.now())

    async def _poll(self) -> None:
        try:
            listing = await self._directory.nodes()
        except KvferryError as error:
            # The directory is soft state: without it, those that were there go on serving.
            if self.directory_error is None:
                log.warning("the directory does not answer: %s", error)
            self.directory_error = error
            return
        if self.directory_error is not None:
            log.info("the directory answers again")
            self.directory_error = None
        self.members.observe(listing, self._clock.now())
        self._tell_changes()
        nodes = self.members.nodes()
        await self._channels.close_idle(
            {node.control for node in nodes} | {node.worker.target for node in nodes if node.worker is not None}
        )
        self._count_nodes()

    async def _probe(self, pair: Pair, probe: Prober) -> None:
        try:
            result: HandoffReport | KvferryError = await probe(pair)
        except KvferryError as error:
            result = error
        news = self.members.probed(pair, result, self._clock.now())
        if isinstance(result, HandoffReport):
            log.info("pair is ready: %s", shown(pair=pair, path=result.path.value, bytes=result.bytes))
            self._notify()
        elif news:
            log.warning("pair is not ready: %s", shown(pair=pair, error=result))
        self._count_nodes()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _tell_changes(self) -> None:
        nodes = {node.address: node.worker for node in self.members.nodes()}
        for address, worker in nodes.items():
            if address not in self._known or self._known[address] != worker:
                log.info(
                    "%s", shown(node=address, role=worker.role.value if worker else "no worker", model=worker and worker.model)
                )
        for address in self._known.keys() - nodes.keys():
            log.info("node is gone: %s", shown(node=address))
        if nodes != self._known:
            for entry in self.members.incompatible():
                log.warning("%s", entry.error)
            self._notify()
        self._known = nodes

    def _count_nodes(self) -> None:
        ready = {
            address
            for status in self.members.statuses()
            if status.state is PairState.READY
            for address in (status.pair.prefill.address, status.pair.decode.address)
        }
        gauge = self._metrics.gauge("nodes")
        gauge.clear()
        for node in self.members.nodes():
            role = node.worker.role.value if node.worker is not None else "none"
            gauge.labels(role, "ready" if node.address in ready else "not_ready").inc()


def _fits(pair: Pair, tokens: int) -> bool:
    layout = pair.decode.worker.layout
    return layout.blocks == 0 or layout.blocks_for(tokens) <= layout.blocks
