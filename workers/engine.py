"""The reference engine: continuous batching over a paged KV cache, one step at a time.

One thread calls :meth:`Engine.run`; the other methods may be called from any thread and take effect before the next step.
What is to be done is decided in ``scheduler`` and ``sequence``; this module does it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from kvferry.clock import Clock, SystemClock
from kvferry.control import Acquired, DecodeWork, PrefillWork
from kvferry.errors import (
    ConfigError,
    InternalError,
    InvalidRequestError,
    KvferryError,
    OutOfBlocksError,
    PeerUnavailableError,
    Stage,
    Where,
)
from kvferry.generation import WorkerLoad
from kvferry.handoff import PagesReady
from kvferry.keys import BlockKey, Fingerprint, block_keys
from kvferry.types import BlockId, OwnerId, decode_owner, prefill_owner
from kvferry.workers.paged_attention import PagedStep, Rows, check_supported
from kvferry.workers.sampler import sample
from kvferry.workers.scheduler import Slice, has_room, plan_step, victim
from kvferry.workers.sequence import Listener, Sequence, State

if TYPE_CHECKING:
    from kvferry.workers.kv_cache import KvCache
    from kvferry.workers.models import LoadedModel

__all__ = ["BlockSource", "Engine", "EngineLimits"]

log = logging.getLogger(__name__)


class BlockSource(Protocol):
    """The pool that the cache's blocks are of. Each method may raise PeerUnavailableError."""

    def acquire(self, owner: OwnerId, keys: Seq[BlockKey], blocks: int) -> Acquired:
        """Hold ``blocks`` blocks, the longest known prefix of ``keys`` among them. Raises OutOfBlocksError."""

    def extend(self, owner: OwnerId, blocks: int) -> tuple[BlockId, ...]:
        """Hold that many more. Raises OutOfBlocksError."""

    def seal(self, owner: OwnerId, blocks: Seq[BlockId], keys: Seq[BlockKey]) -> None:
        """These blocks are written and may be found by their keys. Sealing a block again changes nothing."""

    def release(self, owner: OwnerId) -> None:
        """Let go of all that ``owner`` holds, also where that is nothing."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """chunk_tokens: most tokens in a step; max_sequences: most sequences in a step; context: most tokens in a sequence,
    answer included; retry_seconds: pause before blocks are asked for again when there were none."""

    chunk_tokens: int
    max_sequences: int
    context: int
    retry_seconds: float = 0.05

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, is {getattr(self, name)}")


class _AbandonedStepError(Exception):
    """Everybody with a part in the step was cancelled: nothing of it is wanted, and it has sealed nothing yet."""


class Engine:
    """Runs sequences until they end. Raises ModelFilesError where the model's attention cannot be paged."""

    def __init__(
        self,
        model: LoadedModel,
        cache: KvCache,
        blocks: BlockSource,
        limits: EngineLimits,
        fingerprint: Fingerprint,
        clock: Clock | None = None,
    ) -> None:
        check_supported(model)
        self._model = model
        self._cache = cache
        self._blocks = blocks
        self._limits = limits
        self._fingerprint = fingerprint
        self._clock = clock or SystemClock()
        self._sequences: dict[OwnerId, Sequence] = {}  # in order of arrival
        self._retry_at = float("-inf")  # when blocks may be asked for again
        self._changed = threading.Condition()  # guards what follows
        self._inbox: deque[Callable[[], None]] = deque()
        self._given_up: set[OwnerId] = set()  # cancelled, but the command is still in the inbox
        self._arriving = 0
        self._load = WorkerLoad(0, 0)

    # --- from any thread ----------------------------------------------------------------------------------------------

    def prefill(self, work: PrefillWork, listener: Listener) -> None:
        """Compute a prompt and sample its first token.

        The blocks stay held under ``prefill_owner(request)`` after the token, until :meth:`cancel`.
        """
        tokens = list(work.token_ids)
        owner = prefill_owner(work.request)
        sequence = Sequence(owner, Stage.PREFILL, work.namespace, tokens, len(tokens), work.sampling, listener)
        self._submit(sequence, ())

    def decode(self, work: DecodeWork, blocks: Collection[BlockId], listener: Listener) -> None:
        """Generate on from ``work.token_ids``.

        ``blocks`` are held under ``decode_owner(request)`` and have the KV of the prompt. They are let go with the last
        token or the error.
        """
        owner, tokens = decode_owner(work.request), list(work.token_ids)
        sequence = Sequence(owner, Stage.DECODE, work.namespace, tokens, work.prompt_tokens, work.sampling, listener)
        self._submit(sequence, tuple(blocks))

    def cancel(self, owner: OwnerId, error: KvferryError) -> None:
        """End a sequence in whatever state it is and let its blocks go. Its listener gets ``error`` if it had not ended.

        Changes nothing where ``owner`` is unknown, as after the end. A step that nobody else has a part in is left at the next
        layer: a chunk of a real model can take seconds, and the caller is owed its blocks within one.
        """
        with self._changed:
            self._given_up.add(owner)
        self._post(lambda: self._cancel(owner, error))

    def fail_all(self, error: KvferryError) -> Future[None]:
        """End every sequence. Done when no step writes to their blocks any more."""
        ended: Future[None] = Future()

        def end() -> None:
            try:
                self._end_all(list(self._sequences.values()), error)
            finally:
                ended.set_result(None)

        self._post(end)
        return ended

    def replace(self, cache: KvCache, blocks: BlockSource) -> None:
        """Go on with new memory. What was held in the old one is gone: sequences still there end with PeerUnavailableError."""
        self._post(lambda: self._replace(cache, blocks))

    def load(self) -> WorkerLoad:
        """Sequences being computed, and those waiting for blocks or for the step in progress to end."""
        with self._changed:
            return WorkerLoad(self._load.running, self._load.waiting + self._arriving)

    def wake(self) -> None:
        """Make :meth:`run` look at its ``stop`` again."""
        with self._changed:
            self._changed.notify_all()

    def _submit(self, sequence: Sequence, held: tuple[BlockId, ...]) -> None:
        with self._changed:
            self._arriving += 1
        self._post(lambda: self._accept(sequence, held))

    def _post(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(command)
            self._changed.notify_all()

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set (then :meth:`wake`); sleep while there is nothing to do."""
        while not stop.is_set():
            if not self.step():
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._inbox) or stop.is_set(), self._patience())

    def step(self) -> bool:
        """Obey what other threads asked for, then compute the next step. False where there was nothing to do."""
        obeyed = self._obey()
        self._admit()
        slices = self._grown(plan_step(self._sequences.values(), self._limits.chunk_tokens, self._limits.max_sequences))
        if slices:
            self._attempt([slice_.sequence for slice_ in slices], lambda: self._compute(slices))
        running = sum(sequence.state is State.RUNNING for sequence in self._sequences.values())
        waiting = sum(sequence.state is State.WAITING for sequence in self._sequences.values())
        with self._changed:
            self._load = WorkerLoad(running, waiting)
        return obeyed or bool(slices)

    def check_invariants(self) -> None:
        """Raises AssertionError where a sequence, or two together, contradict themselves. Between steps only."""
        size = self._cache.layout.block_tokens
        holders = Counter(block for sequence in self._sequences.values() for block in sequence.blocks)
        for sequence in self._sequences.values():
            sequence.check_invariants(size)
            assert sequence.state is not State.ENDED, "an ended sequence is forgotten"  # noqa: S101
            unfilled = sequence.blocks[sequence.computed // size :]
            assert all(holders[block] == 1 for block in unfilled), "a block still to be written is nobody else's"  # noqa: S101

    def _patience(self) -> float | None:
        """Seconds to sleep: for good where nobody waits for blocks."""
        waiting = any(sequence.state is State.WAITING for sequence in self._sequences.values())
        return max(0.0, self._retry_at - self._clock.now()) if waiting else None

    def _obey(self) -> bool:
        with self._changed:
            commands, self._inbox = self._inbox, deque()
        for command in commands:
            self._attempt([], command)
        return bool(commands)

    def _accept(self, sequence: Sequence, held: tuple[BlockId, ...]) -> None:
        with self._changed:
            self._arriving -= 1
        if sequence.owner in self._sequences:
            _tell_error(sequence, InvalidRequestError(f"{sequence.owner} is being served already", field="request"))
            return
        self._sequences[sequence.owner] = sequence
        if sequence.stage is Stage.DECODE:
            sequence.place(held, computed=sequence.prompt_tokens, sealed=0)
        refusal = sequence.refusal(self._cache.layout, self._model.vocab_size, self._limits.context)
        if refusal is not None:
            self._end(sequence, refusal)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give blocks to those that wait, first come first served, while they would have a part in the next step."""
        for sequence in [one for one in self._sequences.values() if one.state is State.WAITING]:
            limits = self._limits
            if self._clock.now() < self._retry_at:
                return
            if not has_room(self._sequences.values(), limits.chunk_tokens, limits.max_sequences):
                return
            self._attempt([sequence], lambda sequence=sequence: self._place(sequence))  # type: ignore[misc]

    def _place(self, sequence: Sequence) -> None:
        layout = self._cache.layout
        needed = layout.blocks_for(len(sequence.token_ids))
        if needed > layout.blocks:
            raise OutOfBlocksError(f"{needed} blocks are more than the pool of {layout.blocks} has")
        # The last token is always computed: its logits give the next one.
        reusable = (len(sequence.token_ids) - 1) // layout.block_tokens
        try:
            acquired = self._blocks.acquire(sequence.owner, self._keys(sequence)[:reusable], needed)
        except OutOfBlocksError:
            self._retry_at = self._clock.now() + self._limits.retry_seconds
            return
        cached = acquired.cached_blocks * layout.block_tokens
        sequence.place(acquired.blocks, computed=cached, sealed=acquired.cached_blocks)
        sequence.cached_tokens = cached
        if sequence.stage is Stage.PREFILL:
            sequence.listener.on_blocks(acquired.blocks)
            if cached:
                sequence.listener.on_pages(PagesReady(0, layout.layers, 0, cached))

    def _grown(self, slices: Iterable[Slice]) -> list[Slice]:
        """The slices whose sequences hold blocks for them, after others gave way where that was needed."""
        for slice_ in slices:
            if slice_.sequence.state is State.RUNNING:
                self._attempt([slice_.sequence], lambda slice_=slice_: self._grow(slice_))  # type: ignore[misc]
        return [slice_ for slice_ in slices if slice_.sequence.state is State.RUNNING]

    def _grow(self, slice_: Slice) -> None:
        sequence = slice_.sequence
        while sequence.state is State.RUNNING:
            needed = self._cache.layout.blocks_for(sequence.computed + slice_.tokens)
            missing = needed - len(sequence.blocks)
            if missing <= 0:
                return
            try:
                sequence.blocks += self._blocks.extend(sequence.owner, missing)
            except OutOfBlocksError:
                layout = self._cache.layout
                if needed > layout.blocks:
                    raise InvalidRequestError(
                        f"the answer outgrows a pool of {layout.blocks} blocks of {layout.block_tokens} tokens",
                        where=Where(stage=sequence.stage),
                        hint="Ask for fewer tokens, or give the daemon a larger --pool-bytes.",
                        field="max_tokens",
                    ) from None
                giving_way = victim(self._sequences.values())
                if giving_way is None:
                    raise
                # The last one left gives way too: those who hold the other blocks, by grants, may need its own to go on.
                log.info("out of blocks: %s gives way and is computed again later", giving_way.owner)
                giving_way.preempt()
                self._release(giving_way.owner)

    def _seal(self, sequence: Sequence) -> None:
        """Make the blocks that filled up findable. Failing that costs their reuse only, so the sequence goes on."""
        full = sequence.computed // self._cache.layout.block_tokens
        if full > sequence.sealed:
            new = slice(sequence.sealed, full)
            try:
                self._blocks.seal(sequence.owner, sequence.blocks[new], self._keys(sequence)[new])
            except KvferryError as error:
                log.warning("blocks of %s are not reusable: %s", sequence.owner, error)
            sequence.sealed = full

    def _keys(self, sequence: Sequence) -> list[BlockKey]:
        return block_keys(sequence.namespace, self._fingerprint, self._cache.layout.block_tokens, sequence.token_ids)

    def _release(self, owner: OwnerId) -> None:
        try:
            self._blocks.release(owner)
        except KvferryError as error:  # a daemon that is gone has let them go itself
            log.warning("blocks of %s are not released: %s", owner, error)
        except Exception:
            # The edge to the pool: an end must not fail.
            log.exception("blocks of %s are not released", owner)
        self._retry_at = float("-inf")

    # --- computing ----------------------------------------------------------------------------------------------------

    def _compute(self, slices: list[Slice]) -> None:
        """One forward pass over the slices, then a token for each sequence that has no pending token left."""
        with torch.inference_mode():
            logits = self._forward(slices)
            for slice_ in slices:
                slice_.sequence.computed += slice_.tokens
            complete = [slice_.sequence for slice_ in slices if slice_.sequence.pending == 0]
            for row, sequence in enumerate(complete):
                self._attempt([sequence], lambda row=row, sequence=sequence: self._answer(sequence, logits[row]))  # type: ignore[misc]
        for sequence in [slice_.sequence for slice_ in slices if slice_.sequence.state is not State.ENDED]:
            self._seal(sequence)
            if sequence.finished and sequence.stage is Stage.DECODE:
                self._end(sequence)

    def _forward(self, slices: list[Slice]) -> torch.Tensor:
        """Logits after the last token of each slice that leaves none pending, ``[sequences, vocab]``."""
        ids: list[int] = []
        positions, slots, rows, sampled = [], [], [], []
        for slice_ in slices:
            sequence, first, stop = slice_.sequence, slice_.sequence.computed, slice_.sequence.computed + slice_.tokens
            rows.append(Rows(len(ids), len(ids) + slice_.tokens, torch.tensor(sequence.blocks), stop))
            positions.append(torch.arange(first, stop))
            slots.append(self._cache.slots(sequence.blocks, first, slice_.tokens))
            ids += sequence.token_ids[first:stop]
            if slice_.tokens == sequence.pending:
                sampled.append(len(ids) - 1)
        step = PagedStep(self._cache, torch.cat(slots), tuple(rows), lambda layer: self._layer_written(slices, layer))
        return step.forward(self._model.model, torch.tensor(ids), torch.cat(positions), torch.tensor(sampled, dtype=torch.int64))

    def _layer_written(self, slices: list[Slice], layer: int) -> None:
        with self._changed:
            abandoned = all(slice_.sequence.owner in self._given_up for slice_ in slices)
        if abandoned:
            raise _AbandonedStepError
        _tell_pages(slices, layer)

    def _answer(self, sequence: Sequence, logits: torch.Tensor) -> None:
        token = sample(logits, sequence.sampling, len(sequence.token_ids))
        finish = sequence.finish_with(token.token_id, self._model.eos_token_ids, self._limits.context)
        sequence.listener.on_token(replace(token, finish=finish), sequence.cached_tokens)
        sequence.take(token.token_id, finish)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _attempt(self, sequences: list[Sequence], act: Callable[[], None]) -> None:
        """Act on behalf of sequences; what goes wrong ends those of them that are not through, and nothing else."""
        try:
            act()
        except _AbandonedStepError:
            return  # its sequences end with the next look into the inbox
        except KvferryError as error:
            log.warning("%s", error)
            failure = error
        except Exception as defect:
            # The edge of a step: whatever broke it, other sequences go on.
            log.exception("a step of the engine failed")
            failure = InternalError("a step of the engine failed", why=repr(defect))
        else:
            return
        self._end_all([one for one in sequences if one.state in (State.WAITING, State.RUNNING)], failure)

    def _cancel(self, owner: OwnerId, error: KvferryError) -> None:
        with self._changed:
            self._given_up.discard(owner)
        found = self._sequences.get(owner)
        if found is not None:
            self._end(found, error)

    def _end_all(self, sequences: list[Sequence], error: KvferryError) -> None:
        for sequence in sequences:
            self._end(sequence, error)

    def _end(self, sequence: Sequence, error: KvferryError | None = None) -> None:
        """Let go of the blocks, forget the sequence, and tell its listener the error unless it had its last call."""
        self._forget(sequence)
        self._release(sequence.owner)
        if error is not None and not sequence.finished:
            _tell_error(sequence, error)

    def _forget(self, sequence: Sequence) -> None:
        sequence.end()
        del self._sequences[sequence.owner]

    def _replace(self, cache: KvCache, blocks: BlockSource) -> None:
        for sequence in list(self._sequences.values()):
            self._forget(sequence)
            if not sequence.finished:
                _tell_error(sequence, PeerUnavailableError("the daemon has new memory", where=Where(stage=sequence.stage)))
        self._cache, self._blocks = cache, blocks
        self._retry_at = float("-inf")


def _tell_pages(slices: list[Slice], layer: int) -> None:
    """A layer of the slices' tokens is written; called before they count as computed."""
    for slice_ in slices:
        if slice_.sequence.stage is Stage.PREFILL:
            slice_.sequence.listener.on_pages(PagesReady(layer, 1, slice_.sequence.computed, slice_.tokens))


def _tell_error(sequence: Sequence, error: KvferryError) -> None:
    try:
        sequence.listener.on_error(error)
    except Exception:
        # A listener must not raise; one that does must not end the engine with it.
        log.exception("the listener of %s failed", sequence.owner)
