"""What the nodes say of themselves, asked of all daemons at once, for the admin page and the gauges."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvferry.clock import Clock
from kvferry.control import Empty
from kvferry.errors import KvferryError
from kvferry.metrics import Metrics
from kvferry.node import NodeInfo, NodeStatus
from kvferry.proto.codec import api, rpc
from kvferry.router.channels import Channels
from kvferry.router.members import Membership

__all__ = ["Answer", "Watch"]

_ASK_SECONDS = 1.0
_FRESH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """A listed node, and its status or why there is none."""

    node: NodeInfo
    status: NodeStatus | KvferryError


class Watch:
    """Asks each daemon at most twice a second, however many look."""

    def __init__(self, members: Membership, channels: Channels, clock: Clock, metrics: Metrics) -> None:
        self._members = members
        self._channels = channels
        self._clock = clock
        self._metrics = metrics
        self._one_at_a_time = asyncio.Lock()
        self._answers: tuple[Answer, ...] = ()
        self._asked_at = float("-inf")

    async def answers(self) -> tuple[Answer, ...]:
        """One answer a listed node, in the listing's order; sets the ``pool_blocks`` gauges too."""
        async with self._one_at_a_time:
            if self._clock.now() - self._asked_at >= _FRESH_SECONDS:
                self._answers = tuple(await asyncio.gather(*(self._ask(node) for node in self._members.nodes())))
                self._asked_at = self._clock.now()
                self._set_gauges()
            return self._answers

    async def _ask(self, node: NodeInfo) -> Answer:
        channel = self._channels.to(node.control)
        try:
            status = await rpc.call(channel, api.GET_STATUS, Empty(), _ASK_SECONDS, str(node.address))
        except KvferryError as error:
            return Answer(node, error)
        return Answer(node, status)

    def _set_gauges(self) -> None:
        gauge = self._metrics.gauge("pool_blocks")
        gauge.clear()
        for answer in self._answers:
            if isinstance(answer.status, NodeStatus):
                pool = answer.status.pool
                for state in ("free", "cached", "owned", "leased", "quarantined"):
                    gauge.labels(answer.node.address.node, state).set(getattr(pool, state))
