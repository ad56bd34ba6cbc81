"""The table of metrics: every name, its labels and its meaning, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["TABLE", "Kind", "Metric", "Metrics"]


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row: ``name`` without the ``kvferry_`` prefix (counters get ``_total``), labels, what it counts, and buckets."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

TABLE: tuple[Metric, ...] = (
    Metric("requests", Kind.COUNTER, ("endpoint", "outcome"), "client requests ended, by outcome (ok or an error reason)"),
    Metric("requests_running", Kind.GAUGE, (), "client requests being served"),
    Metric("request_retries", Kind.COUNTER, ("stage", "reason"), "attempts given up and tried again"),
    Metric("ttft_seconds", Kind.HISTOGRAM, (), "from the request's arrival to its first token", _SECONDS),
    Metric("tpot_seconds", Kind.HISTOGRAM, (), "mean time between a request's later tokens", _SECONDS),
    Metric("tokens", Kind.COUNTER, ("kind",), "prompt and completion tokens of ended requests"),
    Metric("handoffs", Kind.COUNTER, ("path", "outcome"), "hand-offs ended, by the path that carried them"),
    Metric("handoff_bytes", Kind.COUNTER, ("path",), "KV bytes that hand-offs moved"),
    Metric("handoff_seconds", Kind.HISTOGRAM, ("path",), "time in which a hand-off's bytes were moving", _SECONDS),
    Metric("nodes", Kind.GAUGE, ("role", "state"), "nodes the router knows, by role and whether they are ready"),
    Metric("pool_blocks", Kind.GAUGE, ("node", "state"), "blocks of a node's pool: free, cached, owned, leased, quarantined"),
)


class Metrics:
    """The prometheus objects for :data:`TABLE` in one registry. for example ``metrics.counter("requests").labels(…).inc()``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for row in TABLE:
            name = f"kvferry_{row.name}"
            match row.kind:
                case Kind.COUNTER:
                    self._counters[row.name] = Counter(name, row.help, row.labels, registry=self.registry)
                case Kind.GAUGE:
                    self._gauges[row.name] = Gauge(name, row.help, row.labels, registry=self.registry)
                case Kind.HISTOGRAM:
                    self._histograms[row.name] = Histogram(
                        name, row.help, row.labels, buckets=row.buckets, registry=self.registry
                    )

    def counter(self, name: str) -> Counter:
        return self._counters[name]

    def gauge(self, name: str) -> Gauge:
        return self._gauges[name]

    def histogram(self, name: str) -> Histogram:
        return self._histograms[name]
