"""What can happen to a sequence besides tokens: waiting, cancelling, refusal, defects, a daemon that goes. No block is lost."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvferry.errors import (
    CancelledByCallerError,
    ConfigError,
    InternalError,
    InvalidRequestError,
    PeerUnavailableError,
)
from kvferry.generation import SamplingParams, Token, WorkerLoad
from kvferry.handoff import PagesReady
from kvferry.types import BlockId, OwnerId, RequestId, decode_owner, prefill_owner
from kvferry.workers.engine import EngineLimits
from kvferry.workers.kv_cache import KvCache
from tests.tiny_models import VOCAB_SIZE
from tests.unit.workers.conftest import Pair
from tests.unit.workers.engine_rig import Blocks, Recorder, Rig, generate, prompt_of

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


def prefill_of(name: str) -> OwnerId:
    return prefill_owner(RequestId(name))


def decode_of(name: str) -> OwnerId:
    return decode_owner(RequestId(name))


def filled(rig: Rig, name: str, prompt: Sequence[int], params: SamplingParams) -> tuple[Recorder, tuple[BlockId, ...]]:
    """Start decoding a prompt whose KV was computed elsewhere, in blocks of the same size."""
    elsewhere = Rig(rig.model, block_tokens=rig.layout.block_tokens)
    first = elsewhere.prefill(name, prompt, params)
    elsewhere.run()
    held = rig.hold(name, prompt).blocks
    rig.tokens[:, :, list(held)] = elsewhere.tokens[:, :, list(first.blocks)]
    return rig.decode(name, prompt, first.ids, params, held), held


def test_cancelling_after_any_number_of_steps_frees_all(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged, block_tokens=4, blocks=24, chunk_tokens=7, max_sequences=3)
    for steps in range(16):
        names = [f"{steps}-{i}" for i in range(4)]
        decodes = {name: filled(rig, name, prompt_of(rng, rng.randint(5, 16)), LONG)[0] for name in names[:2]}
        prefills = {name: rig.prefill(name, prompt_of(rng, rng.randint(5, 30)), LONG) for name in names[2:]}
        for _ in range(steps):
            rig.engine.step()
            rig.engine.check_invariants()
            rig.clock.advance(0.01)
        through = {name for name, heard in (decodes | prefills).items() if heard.over or (name in prefills and heard.tokens)}
        for name in names:
            rig.cancel(prefill_of(name))
            rig.cancel(decode_of(name))
            rig.cancel(decode_of(name))
        rig.engine.step()
        assert rig.blocks.free == rig.layout.blocks
        for name, heard in (decodes | prefills).items():
            assert (name in through) != isinstance(heard.error, CancelledByCallerError)
        assert not rig.engine.step()
        assert rig.engine.load() == WorkerLoad(0, 0)


def test_a_step_that_nobody_wants_any_more_is_left_at_the_next_layer(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged, chunk_tokens=10)

    class Fickle(Recorder):
        def on_pages(self, pages: PagesReady) -> None:
            super().on_pages(pages)
            if pages.first_token == 10 and pages.first_layer == 1:
                rig.cancel(prefill_of("a"))

    heard = rig.prefill("a", prompt_of(rng, 50), LONG, Fickle())
    rig.run()
    assert isinstance(heard.error, CancelledByCallerError)
    assert [pages.first_layer for pages in heard.pages if pages.first_token == 10] == [0, 1], "layer 2 was not written"
    assert max(pages.first_token for pages in heard.pages) == 10
    assert rig.blocks.free == rig.layout.blocks


def test_a_step_that_others_have_a_part_in_goes_on(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged, chunk_tokens=60)

    class Fickle(Recorder):
        def on_pages(self, pages: PagesReady) -> None:
            super().on_pages(pages)
            rig.cancel(prefill_of("a"))

    heard = rig.prefill("a", prompt_of(rng, 20), LONG, Fickle())
    prompt = prompt_of(rng, 30)
    other = rig.prefill("b", prompt, LONG)
    rig.run()
    assert len(heard.tokens) == 1, "the step went on, with its part in it"
    assert [(pages.first_layer, pages.tokens) for pages in other.pages] == [(layer, 30) for layer in range(rig.layout.layers)]
    reference = Rig(llama.paged)
    expected = reference.prefill("b", prompt, LONG)
    reference.run()
    assert other.ids == expected.ids


def test_prefill_waits_its_turn_for_blocks(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged, block_tokens=8, blocks=6)
    first = rig.prefill("first", prompt_of(rng, 30), LONG)
    second = rig.prefill("second", prompt_of(rng, 24), LONG)
    third = rig.prefill("third", prompt_of(rng, 8), LONG)  # would fit, but it is not its turn
    rig.run()
    assert first.tokens
    assert not second.tokens
    assert not third.tokens
    assert rig.engine.load() == WorkerLoad(running=0, waiting=2)
    rig.cancel(prefill_of("first"))
    rig.run()
    assert second.tokens
    assert third.tokens
    assert not second.error


def test_blocks_freed_by_others_are_found_after_a_pause(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged, block_tokens=8, blocks=4)
    grant = rig.hold("elsewhere", prompt_of(rng, 20))
    heard = rig.prefill("a", prompt_of(rng, 30), LONG)
    assert grant.blocks
    rig.engine.step()
    rig.blocks.release(decode_of("elsewhere"))
    rig.engine.step()
    assert not heard.tokens, "it asks again only after a pause"
    rig.clock.advance(0.06)
    rig.run()
    rig.engine.step()
    assert heard.tokens


def test_a_sequence_that_outgrows_the_pool_is_refused(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged, block_tokens=4, blocks=6)
    prompt = prompt_of(rng, 10)
    heard, _ = filled(rig, "a", prompt, LONG)
    rig.run()
    assert isinstance(heard.error, InvalidRequestError), "no use trying it again"
    assert heard.error.field == "max_tokens"
    assert rig.blocks.free == 6
    # 6 blocks hold 24 tokens: the prompt, and 14 of the answer, whose first one prefill gave and whose last is not written.
    assert heard.ids == generate(llama.plain, prompt, 15, eos=[-1])[1:]


def test_a_lone_sequence_waits_for_blocks_that_others_hold(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged, block_tokens=4, blocks=8)
    prompt = prompt_of(rng, 10)
    rig.hold("a grant", prompt_of(rng, 16))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    heard, _ = filled(rig, "a", prompt, params)
    rig.run()
    assert heard.error is None
    assert rig.engine.load() == WorkerLoad(running=0, waiting=1)
    assert rig.blocks.free == 4, "what it held may be just what the others lack"
    rig.blocks.release(decode_of("a grant"))
    rig.clock.advance(1)
    rig.run()
    assert heard.ids == generate(llama.plain, prompt, 20, eos=[-1])[1:]
    assert rig.blocks.free == 8


def test_a_preempted_sequence_can_be_cancelled(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged, block_tokens=4, blocks=8)
    old, _ = filled(rig, "old", prompt_of(rng, 10), SamplingParams(max_tokens=12, ignore_eos=True))
    young, _ = filled(rig, "young", prompt_of(rng, 10), LONG)
    while not (young.tokens and rig.engine.load().waiting):
        assert rig.engine.step()
    rig.cancel(decode_of("young"))
    rig.run()
    assert isinstance(young.error, CancelledByCallerError)
    assert len(old.tokens) == 11
    assert rig.blocks.free == 8


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], LONG, "token_ids"),
        ([1] * 64, LONG, "token_ids"),
        ([1] * 47, LONG, "token_ids"),
        ([1, VOCAB_SIZE], LONG, "token_ids"),
        ([1, -1], LONG, "token_ids"),
        ([1], SamplingParams(max_tokens=0), "max_tokens"),
        ([1], SamplingParams(temperature=-0.5), "temperature"),
        ([1], SamplingParams(temperature=math.nan), "temperature"),
        ([1], SamplingParams(temperature=math.inf), "temperature"),
        ([1], SamplingParams(top_p=0.0), "top_p"),
        ([1], SamplingParams(top_p=1.5), "top_p"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    prompt: list[int], params: SamplingParams, field: str, llama: Pair, rng: random.Random
) -> None:
    rig = Rig(llama.paged, block_tokens=8, blocks=5, context=64)  # 40 tokens of blocks, 64 of context
    busy = rig.prefill("busy", prompt_of(rng, 40), SamplingParams())
    rig.run()
    heard = rig.prefill("a", prompt, params)
    rig.engine.step()
    assert isinstance(heard.error, InvalidRequestError)
    assert heard.error.field == field
    assert busy.tokens
    rig.cancel(prefill_of("busy"))
    rig.run()
    assert rig.blocks.free == 5


def test_decode_of_an_inconsistent_request_is_refused_and_its_blocks_freed(llama: Pair) -> None:
    rig = Rig(llama.paged, block_tokens=8)
    prompt = list(range(20))
    few = rig.decode("few", prompt, [1], LONG, rig.hold("few", prompt).blocks[:2])
    none = rig.decode("none", prompt, [], LONG, rig.hold("none", prompt).blocks)
    done = rig.decode("done", prompt, [1, 2], SamplingParams(max_tokens=2), rig.hold("done", prompt).blocks)
    rig.run()
    assert [type(heard.error) for heard in (few, none, done)] == [InvalidRequestError] * 3
    assert rig.blocks.free == rig.layout.blocks


def test_a_second_sequence_of_the_same_owner_is_refused_and_takes_nothing_from_the_first(llama: Pair) -> None:
    rig = Rig(llama.paged)
    first = rig.prefill("a", [1, 2, 3], LONG)
    second = rig.prefill("a", [1, 2, 3], LONG)
    rig.run()
    assert first.tokens
    assert isinstance(second.error, InvalidRequestError)
    assert rig.blocks.pool.blocks_of(prefill_of("a")) == first.blocks


class OneBroken(Recorder):
    """Fails to take a token."""

    def on_token(self, token: Token, cached_tokens: int) -> None:
        raise RuntimeError("not today")


class AllBroken(Recorder):
    """Fails in the middle of the forward pass, which is everybody's."""

    def on_pages(self, pages: PagesReady) -> None:
        raise RuntimeError("not today")


@pytest.mark.parametrize("listener", [OneBroken, AllBroken])
def test_a_defect_in_a_step_ends_the_sequences_it_concerns_and_no_other(
    listener: type[Recorder], llama: Pair, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(llama.paged, chunk_tokens=16)
    before = rig.prefill("before", prompt_of(rng, 8), LONG)
    rig.run()
    broken = rig.prefill("broken", prompt_of(rng, 8), LONG, listener())
    beside = rig.prefill("beside", prompt_of(rng, 8), LONG)
    after = rig.prefill("after", prompt_of(rng, 8), LONG)
    rig.run()
    assert isinstance(broken.error, InternalError)
    assert "not today" in str(broken.error)
    assert "not today" in caplog.text
    assert before.error is None
    assert bool(beside.tokens) == (listener is OneBroken)
    assert isinstance(beside.error, InternalError) == (listener is AllBroken)
    assert after.tokens
    holding = {prefill_of("before"), prefill_of("after")} | ({prefill_of("beside")} if beside.tokens else set())
    assert set(rig.blocks.pool.owners()) == holding
    rig.engine.check_invariants()


def test_a_sequence_whose_numbers_overflow_fails_alone(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged)
    prompt = prompt_of(rng, 10)
    fine, _ = filled(rig, "fine", prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    other, held = filled(rig, "other", prompt_of(rng, 10), SamplingParams(temperature=1, max_tokens=8))
    rig.tokens[:, :, held[0]] = np.nan
    rig.run()
    assert isinstance(other.error, InternalError)
    assert fine.ids == generate(llama.plain, prompt, 8, eos=[-1])[1:]
    assert rig.blocks.free == rig.layout.blocks


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("broken", [PeerUnavailableError("the daemon is gone"), RuntimeError("the channel is closed")])
def test_a_daemon_that_goes_ends_everything_and_new_memory_serves_again(
    broken: Exception, steps: int, llama: Pair, rng: random.Random
) -> None:
    rig = Rig(llama.paged, block_tokens=4, chunk_tokens=7)
    decoding, _ = filled(rig, "d", prompt_of(rng, 9), LONG)
    prefilling = rig.prefill("p", prompt_of(rng, 30), LONG)
    for _ in range(steps):
        rig.engine.step()
    gone = PeerUnavailableError("the daemon is gone")
    rig.blocks.broken = broken
    ended = rig.engine.fail_all(gone)
    assert not ended.done(), "a step may be writing"
    rig.engine.step()
    assert ended.done()
    assert decoding.error is gone
    assert prefilling.error is gone
    unlucky = rig.prefill("u", prompt_of(rng, 9), LONG)
    rig.run()
    assert isinstance(unlucky.error, PeerUnavailableError if isinstance(broken, PeerUnavailableError) else InternalError)

    fresh = Rig(llama.paged, block_tokens=4, seed=9)
    rig.engine.replace(KvCache(fresh.layout, fresh.arena), fresh.blocks)
    prompt = prompt_of(rng, 20)
    heard = rig.prefill("again", prompt, LONG)
    rig.run()
    assert heard.ids == generate(llama.plain, prompt, 1, eos=[-1])
    assert len(fresh.blocks.pool.blocks_of(prefill_of("again"))) == 5


def test_new_memory_ends_what_was_in_the_old(llama: Pair, rng: random.Random) -> None:
    rig, fresh = Rig(llama.paged), Rig(llama.paged)
    answered = rig.prefill("answered", prompt_of(rng, 8), LONG)
    rig.run()
    decoding, _ = filled(rig, "d", prompt_of(rng, 9), LONG)
    rig.engine.step()
    rig.engine.replace(KvCache(fresh.layout, fresh.arena), fresh.blocks)
    rig.run()
    assert isinstance(decoding.error, PeerUnavailableError)
    assert answered.error is None
    assert fresh.blocks.free == fresh.layout.blocks


def test_a_failing_seal_costs_reuse_only(llama: Pair, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Blocks, *_: object) -> None:
        raise PeerUnavailableError("too late")

    monkeypatch.setattr(Blocks, "seal", refuse)
    rig = Rig(llama.paged)
    prompt = prompt_of(rng, 20)
    heard, _ = filled(rig, "a", prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    rig.run()
    assert heard.ids == generate(llama.plain, prompt, 12, eos=[-1])[1:]
    assert heard.error is None


def test_a_defect_after_the_answer_leaves_the_answered_alone(
    llama: Pair, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Blocks, *_: object) -> None:
        raise RuntimeError("not today")

    rig = Rig(llama.paged, chunk_tokens=30)
    monkeypatch.setattr(Blocks, "seal", fail)
    answered = rig.prefill("answered", prompt_of(rng, 20), LONG)
    unanswered = rig.prefill("unanswered", prompt_of(rng, 20), LONG)
    rig.run()
    assert answered.tokens
    assert answered.error is None
    assert isinstance(unanswered.error, InternalError)
    assert rig.blocks.pool.owners() == (prefill_of("answered"),), "its pages may be on their way"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)  # another thread's progress cannot be advanced from here


def test_the_thread_serves_sleeps_and_stops(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged)
    steps = 0
    step = rig.engine.step

    def counted() -> bool:
        nonlocal steps
        steps += 1
        return step()

    rig.engine.step = counted  # type: ignore[method-assign]
    stop = threading.Event()
    thread = threading.Thread(target=rig.engine.run, args=(stop,))
    thread.start()
    try:
        prompt = prompt_of(rng, 20)
        heard = rig.prefill("a", prompt, LONG)
        wait_until(lambda: bool(heard.tokens))
        assert heard.ids == generate(llama.plain, prompt, 1, eos=[-1])
        settled = -1
        while settled != steps:
            settled = steps
            time.sleep(0.05)
        time.sleep(0.2)
        assert steps == settled, "an idle engine does not step"
        rig.cancel(prefill_of("a"))
        wait_until(lambda: rig.blocks.pool.counts().free == rig.layout.blocks)
    finally:
        stop.set()
        rig.engine.wake()
        thread.join(10)
    assert not thread.is_alive()


def test_the_load_counts_what_has_not_begun(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged, chunk_tokens=16)
    rig.prefill("a", prompt_of(rng, 40), LONG)
    rig.prefill("b", prompt_of(rng, 40), LONG)
    assert rig.engine.load() == WorkerLoad(running=0, waiting=2)
    rig.engine.step()
    assert rig.engine.load() == WorkerLoad(running=1, waiting=1)
    rig.run()
    assert rig.engine.load() == WorkerLoad(running=0, waiting=0)


def test_limits_that_allow_nothing_are_refused() -> None:
    for chunk_tokens, max_sequences in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError):
            EngineLimits(chunk_tokens=chunk_tokens, max_sequences=max_sequences, context=8)
