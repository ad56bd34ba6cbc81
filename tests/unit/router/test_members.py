"""Membership over listings, probes and failed calls; and the choice among what it calls ready."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import PeerUnavailableError
from kvferry.handoff import DataEndpoint, HandoffReport
from kvferry.keys import Fingerprint
from kvferry.layout import DType, Layout
from kvferry.node import NodeInfo, WorkerInfo
from kvferry.router.members import Membership, Pair, PairState
from kvferry.router.policy import choose
from kvferry.types import Incarnation, NodeAddress, NodeId, Path, RequestId, Role

ERROR = PeerUnavailableError("gone")
LAYOUT = Layout(2, 2, 1, 8, DType.FLOAT32, 16)


def node(
    name: str, role: Role | None, life: int = 1, *, revision: str = "r", layout: Layout = LAYOUT, context: int = 64
) -> NodeInfo:
    worker = None
    if role is not None:
        worker = WorkerInfo(role, f"{name}:1", "m", "/m", context, layout, Fingerprint("M", revision, "float32"))
    return NodeInfo(NodeAddress(NodeId(name), Incarnation(f"{life:016x}")), f"{name}:0", DataEndpoint("h", "u", "t"), worker)


def report(pair: Pair) -> HandoffReport:
    return HandoffReport(RequestId("probe"), pair.prefill.address, pair.decode.address, Path.SHM, 33, 1000, 4, 0.1, 0.1)


P, D, B = node("p", Role.PREFILL), node("d", Role.DECODE), node("b", Role.BOTH)


def names(pairs: tuple[Pair, ...]) -> list[tuple[str, str]]:
    return [(pair.prefill.address.node, pair.decode.address.node) for pair in pairs]


def ready(*listing: NodeInfo) -> Membership:
    members = Membership()
    members.observe(listing, 0)
    for pair in members.take_due(0, 100):
        members.probed(pair, report(pair), 0)
    members.check_invariants()
    return members


def test_a_pair_is_ready_after_its_probe_only() -> None:
    members = Membership()
    members.observe([P, D], 0)
    assert members.ready("m") == ()
    assert not members.is_ready()
    (pair,) = members.take_due(0, 4)
    assert members.take_due(0, 4) == []  # it is being probed
    members.probed(pair, ERROR, 0)
    assert not members.is_ready()
    assert members.statuses()[0].error is ERROR
    assert members.take_due(0.1, 4) == []
    assert members.take_due(10, 4) == [pair]
    members.probed(pair, report(pair), 10)
    assert names(members.ready("m")) == [("p", "d")]
    assert members.is_ready()


def test_roles_make_pairs() -> None:
    assert names(ready(P, D, B).ready("m")) == [("p", "d"), ("p", "b"), ("b", "d"), ("b", "b")]
    assert ready(P).statuses() == ()
    assert ready(node("x", None), P, D).is_ready()


def test_a_failed_call_takes_all_pairs_of_the_node_out_until_probed() -> None:
    members = ready(P, node("p2", Role.PREFILL), D)
    members.call_failed(P.address, ERROR, 5)
    assert names(members.ready("m")) == [("p2", "d")]
    assert members.is_ready()  # the other pair serves
    (pair,) = members.take_due(5, 4)
    members.probed(pair, report(pair), 5)
    assert len(members.ready("m")) == 2


def test_a_failed_pair_leaves_the_others() -> None:
    members = ready(P, D, node("d2", Role.DECODE))
    members.pair_failed(members.ready("m")[0], ERROR, 0)
    assert names(members.ready("m")) == [("p", "d2")]


def test_a_new_life_and_a_new_worker_must_prove_themselves() -> None:
    members = ready(P, D)
    newer = node("d", Role.DECODE, life=2)
    members.observe([P, D, newer], 1)  # the old life's entry has not expired
    assert [status.pair.decode.address for status in members.statuses()] == [newer.address]
    assert members.ready("m") == ()
    members.observe([P, newer, D], 1)  # whatever the order
    assert [status.pair.decode.address for status in members.statuses()] == [newer.address]
    members = ready(P, D)
    assert D.worker is not None
    members.observe([P, replace(D, worker=replace(D.worker, target="d:2"))], 1)
    assert members.ready("m") == ()


def test_an_outdated_probe_changes_nothing() -> None:
    members = Membership()
    members.observe([P, D], 0)
    (pair,) = members.take_due(0, 4)
    members.observe([P], 1)
    members.probed(pair, report(pair), 1)
    assert members.statuses() == ()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (node("d", Role.DECODE, revision="s"), "revision: r here, s there"),
        (node("d", Role.DECODE, layout=replace(LAYOUT, heads=4)), "heads: 1 here, 4 there"),
    ],
)
def test_incompatible_pairs_are_told_and_not_used(other: NodeInfo, told: str) -> None:
    members = ready(P, other)
    assert members.statuses() == ()
    (entry,) = members.incompatible()
    assert told in str(entry.error)
    assert str(P.address) in str(entry.error)
    assert str(other.address) in str(entry.error)
    assert not members.is_ready()


def test_block_sizes_may_differ() -> None:
    assert ready(P, node("d", Role.DECODE, layout=replace(LAYOUT, block_tokens=32))).is_ready()


def test_models_are_remembered_for_a_while() -> None:
    members = ready(P, node("d", Role.DECODE, context=32))
    worker = members.worker("m")
    assert worker is not None
    assert worker.context == 32
    assert members.has_served("m")
    members.observe([], 60)
    assert members.models() == ("m",)
    assert members.has_served("m")
    members.observe([], 1000)
    assert members.models() == ()
    assert members.worker("m") is None
    assert not members.has_served("m")


@given(st.integers())
def test_any_history(seed: int) -> None:
    chance = random.Random(seed)
    members = Membership()
    world = [
        node(name, role, life) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("b", Role.BOTH)) for life in (1, 2)
    ]
    world += [node("x", Role.DECODE, revision="other"), node("n", None)]
    pending: list[Pair] = []
    proven: set[Pair] = set()
    now = 0.0
    for _ in range(60):
        now += chance.random()
        action = chance.randrange(4)
        if action == 0:
            members.observe(chance.sample(world, chance.randrange(len(world) + 1)), now)
        elif action == 1:
            pending += members.take_due(now, 3)
        elif action == 2 and pending:
            pair = pending.pop(chance.randrange(len(pending)))
            good = chance.random() < 0.7
            members.probed(pair, report(pair) if good else ERROR, now)
            if good:
                proven.add(pair)
        elif action == 3:
            members.call_failed(chance.choice(world).address, ERROR, now)
        members.check_invariants()
        assert set(members.ready("m")) <= proven


def test_the_least_loaded_pair_is_chosen_and_ties_are_left_to_chance() -> None:
    members = ready(P, node("p2", Role.PREFILL), D, node("d2", Role.DECODE))
    pairs = members.ready("m")
    load = {P.address: 3, D.address: 1}
    assert names((choose(pairs, load, (), random.Random(0)),)) == [("p2", "d2")]
    chosen = {choose(pairs, {}, (), random.Random(seed)) for seed in range(50)}
    assert chosen == set(pairs)
    (avoided,) = [pair for pair in pairs if names((pair,)) == [("p2", "d2")]]
    assert names((choose(pairs, load, [avoided], random.Random(0)),)) == [("p2", "d")]
    assert choose([avoided], load, [avoided], random.Random(0)) is avoided


def test_states_have_names_for_people() -> None:
    assert [state.value for state in PairState] == ["new", "ready", "failed", "suspect"]
