"""What holds for a hand-off on every path: the same suite runs over shared memory and over TCP."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path as FilePath

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.clock import ManualClock
from kvferry.config import PathPolicy
from kvferry.errors import (
    CancelledByCallerError,
    ConfigError,
    DeadlineExceededError,
    FingerprintMismatchError,
    LayoutMismatchError,
    PeerUnavailableError,
    ProtocolError,
    Stage,
    StaleGrantError,
)
from kvferry.handoff import Grant, PagesReady
from kvferry.layout import DType, Layout
from kvferry.transfer.session import FRAME_BYTES, MAX_WAITING_FRAMES
from kvferry.types import BlockId, Epoch, Path
from tests.conformance.ferry_child import ticket_from_json, ticket_to_json
from tests.conformance.ferry_rig import (
    FINGERPRINT,
    LAYOUT,
    PATIENCE,
    POLICIES,
    Rig,
    Source,
    Target,
    Valve,
    nothing_left,
    send,
    spans_by_layer,
)

# A sender that has done nothing for so long has nothing it could do.
SETTLED = 1.0
ROOT = FilePath(__file__).parents[2]
# One token of one layer is 32 KiB: a prompt of some hundred tokens is many frames.
LARGE = Layout(layers=2, tensors=2, heads=32, head_dim=128, dtype=DType.FLOAT32, block_tokens=4, blocks=110)


@pytest.fixture(params=[Path.SHM, Path.TCP], ids=lambda path: path.value)
def path(request: pytest.FixtureRequest) -> Path:
    value: Path = request.param
    return value


@pytest.fixture
def rig(tmp_path: FilePath) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def hand_over(source: Source, target: Target, grant: Grant, spans: list[PagesReady]) -> None:
    """Send ``spans`` from fresh random blocks and compare every byte of the prompt that was owed."""
    blocks = source.blocks(grant.tokens)
    handoff = source.engine.open(target.ticket(grant), blocks, PATIENCE)
    send(handoff, spans)
    report = handoff.finish().result(PATIENCE)
    sent = source.pages(blocks, grant.tokens)[:, :, grant.cached_tokens :]
    assert np.array_equal(target.pages(grant)[:, :, grant.cached_tokens :], sent)
    assert report.bytes == sent.nbytes
    assert grant.grant in target.gate.completed


# Bytes


@st.composite
def hand_offs(draw: st.DrawFn) -> tuple[Layout, Layout, int, int, list[PagesReady]]:
    """Source layout, target layout, tokens, cached tokens, and spans that cover what is owed, in a random order."""
    base = Layout(
        layers=draw(st.integers(1, 4)),
        tensors=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 8, 64])),
        dtype=draw(st.sampled_from(DType)),
        block_tokens=1,
    )
    source = replace(base, block_tokens=draw(st.integers(1, 40)), blocks=draw(st.integers(1, 12)))
    target = replace(base, block_tokens=draw(st.integers(1, 40)), blocks=draw(st.integers(1, 12)))
    most = min(source.blocks * source.block_tokens, target.blocks * target.block_tokens)
    tokens = draw(st.integers(1, most))
    cached = draw(st.integers(0, tokens - 1))
    cuts = sorted(draw(st.sets(st.integers(cached + 1, tokens), max_size=3)) | {cached, tokens})
    step = draw(st.integers(1, base.layers))
    spans = [
        PagesReady(layer, min(step, base.layers - layer), first, end - first)
        for first, end in pairwise(cuts)
        for layer in range(0, base.layers, step)
    ]
    return source, target, tokens, cached, draw(st.permutations(spans))


@given(example=hand_offs(), path=st.sampled_from([Path.SHM, Path.TCP]))
@settings(max_examples=60)
def test_every_byte_arrives_in_its_place_and_nowhere_else(
    example: tuple[Layout, Layout, int, int, list[PagesReady]], path: Path
) -> None:
    source_layout, target_layout, tokens, cached, spans = example
    with tempfile.TemporaryDirectory() as directory:
        rig = Rig(FilePath(directory))
        try:
            target, source = rig.target(target_layout), rig.source(POLICIES[path], source_layout)
            before = target.arena.bytes.copy()
            grant = target.gate.open(tokens, cached)
            hand_over(source, target, grant, spans)
            # Put back what may change; the rest must be as it was.
            after = target.arena.bytes.copy()
            for layer in range(target_layout.layers):
                for tensor in range(target_layout.tensors):
                    for token in range(cached, tokens):
                        index, within = divmod(token, target_layout.block_tokens)
                        start = target_layout.page_offset(layer, tensor, grant.blocks[index]) + within * target_layout.token_bytes
                        after[start : start + target_layout.token_bytes] = before[start : start + target_layout.token_bytes]
            assert np.array_equal(before, after)
        finally:
            rig.close()


@pytest.mark.parametrize(("from_tokens", "to_tokens"), [(16, 32), (32, 16), (16, 16), (5, 7)])
def test_block_sizes_may_differ(rig: Rig, path: Path, from_tokens: int, to_tokens: int) -> None:
    target = rig.target(replace(LAYOUT, block_tokens=to_tokens))
    source = rig.source(POLICIES[path], replace(LAYOUT, block_tokens=from_tokens))
    for tokens in (1, 15, 16, 17, 31, 32, 33, 100):
        grant = target.gate.open(tokens)
        hand_over(source, target, grant, spans_by_layer(grant, LAYOUT.layers))
        target.gate.adopt(grant)
    target.gate.wait_all_free()


def test_many_hand_offs_share_one_connection(rig: Rig, path: Path) -> None:
    target, source = rig.target(replace(LAYOUT, blocks=400)), rig.source(POLICIES[path], replace(LAYOUT, blocks=400))
    threads_before = threading.active_count()
    chooser = random.Random(3)
    sizes = [chooser.randint(1, 120) for _ in range(40)]
    plans = []
    for tokens in sizes:
        grant = target.gate.open(tokens, cached=chooser.randint(0, tokens - 1))
        plans.append((grant, source.blocks(tokens)))

    def one(plan: tuple[Grant, list[BlockId]]) -> None:
        grant, blocks = plan
        handoff = source.engine.open(target.ticket(grant), blocks, PATIENCE)
        send(handoff, spans_by_layer(grant, LAYOUT.layers))
        report = handoff.finish().result(PATIENCE)
        assert report.path is path

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, plans))
        # Two threads of one link and one that receives, beside those of the pool.
        assert threading.active_count() <= threads_before + 8 + 3
    for grant, blocks in plans:
        sent = source.pages(blocks, grant.tokens)[:, :, grant.cached_tokens :]
        assert np.array_equal(target.pages(grant)[:, :, grant.cached_tokens :], sent)


def test_a_small_hand_off_does_not_wait_for_a_large_one(rig: Rig, path: Path) -> None:
    target, source = rig.target(LARGE), rig.source(POLICIES[path], LARGE)
    valve = Valve()
    target.gate.during = valve
    large, small = target.gate.open(400), target.gate.open(1)
    both = [source.engine.open(target.ticket(grant), source.blocks(grant.tokens), PATIENCE) for grant in (large, small)]
    send(both[0], [PagesReady(layer, 1, token, 16) for token in range(0, 400, 16) for layer in (1, 0)])
    assert valve.entered.wait(PATIENCE)
    send(both[1], [PagesReady(0, 2, 0, 1)])
    valve.open.set()
    for handoff in both:
        handoff.finish().result(PATIENCE)
    order = [grant for grant, _ in target.gate.began]
    # Before the small one comes at most what was sent when it was announced, 8 MiB of 512 KiB frames, and one turn.
    assert order.index(small.grant) <= 18 < order.count(large.grant)


def test_a_report_says_who_what_and_how(rig: Rig, path: Path) -> None:
    target, source = rig.target(), rig.source(POLICIES[path])
    grant = target.gate.open(40, cached=16)
    handoff = source.engine.open(target.ticket(grant), source.blocks(40), PATIENCE)
    send(handoff, spans_by_layer(grant, LAYOUT.layers))
    report = handoff.finish().result(PATIENCE)
    assert (report.request, report.target, report.path, report.tokens) == (grant.request, target.address, path, 40)
    assert report.source.node == "source"
    assert report.bytes == 3 * 2 * 24 * LAYOUT.token_bytes
    assert report.pages == 3 * 2 * 2
    assert 0 < report.transfer_seconds < PATIENCE
    assert 0 < report.tail_seconds < PATIENCE


def test_nothing_to_move_is_complete_at_once(rig: Rig, path: Path) -> None:
    target, source = rig.target(), rig.source(POLICIES[path])
    grant = target.gate.open(32, cached=32)
    assert target.gate.completed == [grant.grant]
    report = source.engine.open(target.ticket(grant), source.blocks(32), PATIENCE).finish().result(PATIENCE)
    assert (report.bytes, report.pages, report.transfer_seconds, report.path) == (0, 0, 0.0, path)
    assert target.gate.began == []
    target.gate.adopt(grant)


# Bounds


def test_at_the_bound_no_more_is_taken_until_there_is_room(rig: Rig, path: Path) -> None:
    layout = replace(LAYOUT, blocks=100)
    target, source = rig.target(layout), rig.source(POLICIES[path], layout)
    valve = Valve()
    target.gate.during = valve
    grant = target.gate.open(1500)
    blocks = source.blocks(1500)
    handoff = source.engine.open(target.ticket(grant), blocks, PATIENCE)
    # From the last token to the first, so that no two frames join.
    spans = [PagesReady(0, 3, token, 1) for token in reversed(range(1500))]
    taken = 0
    # A slow sender makes room once more while its window fills; the closed valve ends that.
    more = True
    while more:
        if handoff.ready(spans[taken]):
            taken += 1
        else:
            more = handoff.wait_for_room(SETTLED)
    assert MAX_WAITING_FRAMES <= taken < 2 * MAX_WAITING_FRAMES
    valve.open.set()
    assert handoff.wait_for_room(PATIENCE)
    send(handoff, spans[taken:])
    handoff.finish().result(PATIENCE)
    assert np.array_equal(target.pages(grant), source.pages(blocks, 1500))


def test_frames_stay_small_whatever_is_announced(rig: Rig, path: Path) -> None:
    target, source = rig.target(LARGE), rig.source(POLICIES[path], LARGE)
    grant = target.gate.open(150)
    hand_over(source, target, grant, [PagesReady(0, 2, 0, 150)])
    most = max(span.layers * span.tokens * 2 * LARGE.token_bytes for _, span in target.gate.began)
    assert FRAME_BYTES // 2 < most <= FRAME_BYTES


# Ends


def test_pages_that_were_never_announced_fail_the_hand_off(rig: Rig, path: Path) -> None:
    target, source = rig.target(), rig.source(POLICIES[path])
    grant = target.gate.open(20)
    handoff = source.engine.open(target.ticket(grant), source.blocks(20), PATIENCE)
    send(handoff, spans_by_layer(grant, 2))
    with pytest.raises(ProtocolError, match="never announced"):
        handoff.finish().result(PATIENCE)
    target.gate.wait_all_free()
    assert isinstance(target.gate.failed[grant.grant], ProtocolError)


@pytest.mark.parametrize(
    "span",
    [PagesReady(0, 1, 0, 1), PagesReady(2, 2, 8, 1), PagesReady(0, 1, 19, 2), PagesReady(0, 0, 8, 1), PagesReady(0, 1, 8, 0)],
    ids=["cached", "layer", "token", "no layer", "no token"],
)
def test_pages_that_are_not_owed_are_refused_and_harm_nothing(rig: Rig, path: Path, span: PagesReady) -> None:
    target, source = rig.target(), rig.source(POLICIES[path])
    grant = target.gate.open(20, cached=8)
    blocks = source.blocks(20)
    handoff = source.engine.open(target.ticket(grant), blocks, PATIENCE)
    with pytest.raises(ProtocolError):
        handoff.ready(span)
    send(handoff, spans_by_layer(grant, LAYOUT.layers))
    with pytest.raises(ProtocolError, match="come twice"):
        handoff.ready(PagesReady(0, 1, 8, 1))
    handoff.finish().result(PATIENCE)
    with pytest.raises(ProtocolError, match="after the last"):
        handoff.ready(PagesReady(0, 1, 8, 1))


def test_abort_tells_the_peer_and_spares_the_connection(rig: Rig, path: Path) -> None:
    target, source = rig.target(), rig.source(POLICIES[path])
    grant, other = target.gate.open(20), target.gate.open(20)
    handoff = source.engine.open(target.ticket(grant), source.blocks(20), PATIENCE)
    assert handoff.ready(PagesReady(0, 1, 0, 20))
    why = CancelledByCallerError("the client left")
    handoff.abort(why)
    assert handoff.finish().exception(0) is why
    with pytest.raises(CancelledByCallerError):
        handoff.ready(PagesReady(1, 1, 0, 20))
    target.gate.wait(lambda: grant.grant in target.gate.failed)
    assert isinstance(target.gate.failed[grant.grant], CancelledByCallerError)
    assert target.gate.failed[grant.grant].what == "the client left"
    hand_over(source, target, other, spans_by_layer(other, LAYOUT.layers))
    target.gate.adopt(other)
    target.gate.wait_all_free()


def test_abort_returns_only_when_the_pages_are_not_read_any_more(rig: Rig, path: Path) -> None:
    """A peer that holds a write for long loses its connection, and what it copies then does not count."""
    target, source = rig.target(), rig.source(POLICIES[path])
    valve = Valve()
    target.gate.during = valve
    grant = target.gate.open(16)
    blocks = source.blocks(16)
    handoff = source.engine.open(target.ticket(grant), blocks, PATIENCE)
    send(handoff, [PagesReady(0, LAYOUT.layers, 0, 16)])  # all that is owed, in one write
    assert valve.entered.wait(PATIENCE)
    expected = source.pages(blocks, 16).copy()
    handoff.abort(CancelledByCallerError("given up"))
    source.arena.bytes[:] = 0  # the blocks are reused at once
    valve.open.set()
    target.gate.wait(lambda: bool(target.gate.ended))
    if grant.grant in target.gate.completed:  # TCP: the bytes had left before
        assert path is Path.TCP
        assert np.array_equal(target.pages(grant), expected)
    else:
        target.gate.wait_all_free()


def test_a_hand_off_ends_at_its_deadline(rig: Rig, path: Path) -> None:
    target, source = rig.target(), rig.source(POLICIES[path])
    grant = target.gate.open(20)
    handoff = source.engine.open(target.ticket(grant), source.blocks(20), 0.2)
    error = handoff.future.exception(PATIENCE)
    assert isinstance(error, DeadlineExceededError)
    assert (error.where.stage, error.where.peer, error.where.path) == (Stage.HANDOFF, str(target.address), path)
    target.gate.wait_all_free()
    assert isinstance(target.gate.failed[grant.grant], DeadlineExceededError)


def test_a_peer_that_never_acknowledges_does_not_hold_a_hand_off(rig: Rig, path: Path) -> None:
    target, source = rig.target(), rig.source(POLICIES[path])
    valve = Valve()
    target.gate.during = valve
    grant = target.gate.open(20)
    handoff = source.engine.open(target.ticket(grant), source.blocks(20), 0.2)
    send(handoff, spans_by_layer(grant, LAYOUT.layers - 1))
    assert valve.entered.wait(PATIENCE)
    assert isinstance(handoff.future.exception(PATIENCE), DeadlineExceededError)
    assert not target.gate.ended
    valve.open.set()
    target.gate.wait_all_free()


# Grants


def test_a_grant_revoked_during_a_write_frees_its_blocks_after_it(rig: Rig, path: Path) -> None:
    target, source = rig.target(), rig.source(POLICIES[path])
    valve = Valve()
    target.gate.during = valve
    grant = target.gate.open(20)
    handoff = source.engine.open(target.ticket(grant), source.blocks(20), PATIENCE)
    send(handoff, spans_by_layer(grant, LAYOUT.layers))
    assert valve.entered.wait(PATIENCE)
    target.gate.revoke(grant, CancelledByCallerError("the client left"))
    assert len(target.gate.free) == LAYOUT.blocks - 2
    valve.open.set()
    with pytest.raises(StaleGrantError) as caught:
        handoff.finish().result(PATIENCE)
    assert (caught.value.where.stage, caught.value.where.path) == (Stage.HANDOFF, path)
    target.gate.wait_all_free()
    assert target.gate.completed == []


def test_an_expired_grant_takes_nothing(rig: Rig, path: Path) -> None:
    clock = ManualClock()
    target, source = rig.target(clock=clock), rig.source(POLICIES[path])
    before = target.arena.bytes.copy()
    grant = target.gate.open(20, seconds=5)
    handoff = source.engine.open(target.ticket(grant), source.blocks(20), PATIENCE)
    clock.advance(5)
    send(handoff, spans_by_layer(grant, LAYOUT.layers))
    with pytest.raises(StaleGrantError, match="deadline"):
        handoff.finish().result(PATIENCE)
    assert np.array_equal(target.arena.bytes, before)
    target.gate.expire()
    target.gate.wait_all_free()


def test_a_write_that_ends_after_the_deadline_does_not_count(rig: Rig, path: Path) -> None:
    clock = ManualClock()
    target, source = rig.target(clock=clock), rig.source(POLICIES[path])
    target.gate.during = lambda grant, span: clock.advance(5)
    grant = target.gate.open(16, seconds=5)
    handoff = source.engine.open(target.ticket(grant), source.blocks(16), PATIENCE)
    send(handoff, [PagesReady(0, LAYOUT.layers, 0, 16)])
    with pytest.raises(StaleGrantError):
        handoff.finish().result(PATIENCE)
    assert target.gate.completed == []
    target.gate.wait_all_free()


def test_another_epoch_or_an_unknown_grant_takes_nothing(rig: Rig, path: Path) -> None:
    target, source = rig.target(), rig.source(POLICIES[path])
    before = target.arena.bytes.copy()
    grant = target.gate.open(20)
    for wrong in (replace(grant, epoch=Epoch(6)), replace(grant, grant=type(grant.grant)(77))):
        handoff = source.engine.open(target.ticket(wrong), source.blocks(20), PATIENCE)
        send(handoff, spans_by_layer(wrong, LAYOUT.layers))
        with pytest.raises(StaleGrantError):
            handoff.finish().result(PATIENCE)
    assert np.array_equal(target.arena.bytes, before)
    hand_over(source, target, grant, spans_by_layer(grant, LAYOUT.layers))


# Who is on the other side


@pytest.mark.parametrize(
    "change",
    [{"layers": 4}, {"tensors": 1}, {"heads": 3}, {"head_dim": 8}, {"dtype": DType.BFLOAT16}],
    ids=lambda c: next(iter(c)),
)
def test_layouts_that_do_not_match_are_refused_at_connect_on_both_sides(
    rig: Rig, path: Path, change: dict[str, int | DType], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    other = replace(LAYOUT, **change)  # type: ignore[arg-type]
    target, source = rig.target(), rig.source(POLICIES[path], other)
    grant = target.gate.open(20)
    with pytest.raises(LayoutMismatchError) as caught:
        source.engine.open(target.ticket(grant), source.blocks(20), PATIENCE)
    name = next(iter(change))
    ours, theirs = (getattr(side, "value", side) for side in (getattr(other, name), getattr(LAYOUT, name)))
    assert caught.value.why == f"{name}: {ours} here, {theirs} there"
    assert (caught.value.where.stage, caught.value.where.peer) == (Stage.CONNECT, str(target.address))
    rig.close()  # the receiving side has said all it will
    assert f"{name}: {theirs} here, {ours} there" in caplog.text
    assert target.gate.began == []


def test_fingerprints_that_do_not_match_are_refused_at_connect_on_both_sides(
    rig: Rig, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    target, source = rig.target(), rig.source(POLICIES[path], fingerprint=replace(FINGERPRINT, revision="2"))
    grant = target.gate.open(20)
    with pytest.raises(FingerprintMismatchError) as caught:
        source.engine.open(target.ticket(grant), source.blocks(20), PATIENCE)
    assert caught.value.why == "revision: 2 here, 1 there"
    rig.close()
    assert "revision: 1 here, 2 there" in caplog.text


def test_a_restarted_peer_is_not_the_one_of_the_ticket(rig: Rig, path: Path) -> None:
    first, source = rig.target(), rig.source(POLICIES[path])
    grant = first.gate.open(20)
    handoff = source.engine.open(first.ticket(grant), source.blocks(20), PATIENCE)
    assert handoff.ready(PagesReady(0, 1, 0, 20))
    first.gate.wait(lambda: bool(first.gate.ended))
    first.receiver.close()
    first.gate.wait_all_free()
    with pytest.raises(PeerUnavailableError) as caught:
        handoff.future.result(PATIENCE)
    assert (caught.value.where.stage, caught.value.where.peer, caught.value.where.path) == (
        Stage.HANDOFF, str(first.address), path,
    )  # fmt: skip
    second = rig.target(life=2, port=int(first.endpoint.tcp.rpartition(":")[2]))
    with pytest.raises(PeerUnavailableError, match="restarted") as caught:
        source.engine.open(first.ticket(grant), source.blocks(20), PATIENCE)
    assert caught.value.where.stage is Stage.CONNECT
    fresh = second.gate.open(20)
    hand_over(source, second, fresh, spans_by_layer(fresh, LAYOUT.layers))


def test_nobody_there_is_said_with_the_address(rig: Rig, path: Path) -> None:
    target, source = rig.target(), rig.source(POLICIES[path])
    grant = target.gate.open(20)
    target.receiver.close()
    with pytest.raises(PeerUnavailableError) as caught:
        source.engine.open(target.ticket(grant), source.blocks(20), PATIENCE)
    assert (caught.value.where.stage, caught.value.where.path) == (Stage.CONNECT, path)
    assert (target.endpoint.unix if path is Path.SHM else target.endpoint.tcp) in str(caught.value)


def test_a_sender_killed_during_a_write_frees_its_blocks(rig: Rig, path: Path) -> None:
    target = rig.target()
    valve = Valve(after=1)
    target.gate.during = valve
    grant = target.gate.open(20)
    command = [sys.executable, "-m", "tests.conformance.ferry_child", "sender"]
    command += [ticket_to_json(target.ticket(grant)), POLICIES[path].value]
    with subprocess.Popen(command, cwd=ROOT) as child:
        assert valve.entered.wait(PATIENCE)
        child.send_signal(signal.SIGKILL)
        child.wait()
        valve.open.set()
    target.gate.wait_all_free()
    assert isinstance(target.gate.failed[grant.grant], PeerUnavailableError)
    if path is Path.SHM:  # what was copied out of a dead writer's arena does not count
        assert [error is None for _, _, error in target.gate.ended] == [True, False]


def test_a_receiver_killed_during_a_write_fails_the_hand_off(rig: Rig, path: Path, tmp_path: FilePath) -> None:
    source = rig.source(POLICIES[path])
    command = [sys.executable, "-m", "tests.conformance.ferry_child", "receiver", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        ticket = ticket_from_json(child.stdout.readline())
        handoff = source.engine.open(ticket, source.blocks(ticket.grant.tokens), PATIENCE)
        for span in reversed(spans_by_layer(ticket.grant, LAYOUT.layers)):  # backwards, so that each is a frame of its own
            assert handoff.ready(span)
        assert child.stdout.readline() == "writing\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
    with pytest.raises(PeerUnavailableError) as caught:
        handoff.finish().result(PATIENCE)
    assert (caught.value.where.stage, caught.value.where.peer, caught.value.where.path) == (
        Stage.HANDOFF, str(ticket.target), path,
    )  # fmt: skip
    with pytest.raises(PeerUnavailableError):
        source.engine.open(ticket, source.blocks(ticket.grant.tokens), PATIENCE)


# Which path


def test_auto_takes_shared_memory_on_one_machine_and_tcp_between_machines(rig: Rig) -> None:
    target, source = rig.target(), rig.source(PathPolicy.AUTO)
    near = target.gate.open(20)
    assert source.engine.open(target.ticket(near), source.blocks(20), PATIENCE).path is Path.SHM
    other = rig.source(PathPolicy.AUTO)
    far = replace(target, endpoint=replace(target.endpoint, host="machine-2"))
    assert other.engine.open(far.ticket(near), other.blocks(20), PATIENCE).path is Path.TCP
    with pytest.raises(ConfigError, match="another machine"):
        rig.source(PathPolicy.SHM).engine.open(far.ticket(near), source.blocks(20), PATIENCE)


def test_auto_says_so_when_shared_memory_fails_on_one_machine(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    target, source = rig.target(), rig.source(PathPolicy.AUTO)
    apart = replace(target, endpoint=replace(target.endpoint, unix=str(rig.directory / "not there")))
    grant = target.gate.open(20)
    hand_over(source, apart, grant, spans_by_layer(grant, LAYOUT.layers))
    assert [record.levelname for record in caplog.records if "TCP instead" in record.message] == ["WARNING"]


# What is left


def test_no_thread_and_no_descriptor_is_left(path: Path, tmp_path: FilePath) -> None:
    def cycle() -> None:
        rig = Rig(tmp_path)
        target, source = rig.target(), rig.source(POLICIES[path])
        grant = target.gate.open(20)
        hand_over(source, target, grant, spans_by_layer(grant, LAYOUT.layers))
        rig.close()

    cycle()  # what is made once stays
    with nothing_left():
        for _ in range(20):
            cycle()
    assert not (tmp_path / "data.sock").exists()


def test_no_thread_and_no_descriptor_is_left_of_a_refused_connection(path: Path, tmp_path: FilePath) -> None:
    rig = Rig(tmp_path)
    target, source = rig.target(), rig.source(POLICIES[path], replace(LAYOUT, heads=1))
    grant = target.gate.open(20)

    def refused() -> None:
        with pytest.raises(LayoutMismatchError):
            source.engine.open(target.ticket(grant), source.blocks(20), PATIENCE)

    refused()
    with nothing_left():
        for _ in range(20):
            refused()
    rig.close()
