"""The engine's tokens against transformers' own: divided, with reused prefixes, preempted, sampled, with log probabilities."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry.generation import FinishReason, SamplingParams
from kvferry.keys import Namespace, block_keys
from kvferry.types import OwnerId, RequestId, decode_owner, prefill_owner
from kvferry.workers.sampler import sample
from tests.tiny_models import EOS
from tests.unit.workers.conftest import Pair
from tests.unit.workers.engine_rig import FINGERPRINT, Rig, generate, next_logits, prompt_of, split

KINDS = ["llama", "llama-mqa", "llama-mha", "qwen3", "qwen3-window"]
CHUNK = 24
# At, below and above the edges of blocks of 4, 8 and 16 tokens and of chunks of 24.
EDGES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 72, 97]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (16, 4), (4, 8)])
def test_divided_tokens_equal_the_undivided(
    kind: str, ours: int, theirs: int, pair: Callable[[str], Pair], rng: random.Random
) -> None:
    models = pair(kind)
    source = Rig(models.paged, block_tokens=ours, blocks=1600 // ours, chunk_tokens=CHUNK, seed=1)
    target = Rig(models.paged, block_tokens=theirs, blocks=2000 // theirs, chunk_tokens=CHUNK, seed=2)
    lengths = [*rng.sample(EDGES, 10), *(rng.randint(1, 100) for _ in range(4))]
    prompts = {str(i): prompt_of(rng, length) for i, length in enumerate(lengths)}
    params = {name: SamplingParams(max_tokens=rng.randint(1, 20)) for name in prompts}

    found = split(source, target, prompts, params)

    assert found == {name: generate(models.plain, prompts[name], params[name].max_tokens) for name in prompts}
    assert target.blocks.free == target.layout.blocks
    for name in prompts:
        source.cancel(prefill_owner(RequestId(name)))
    source.run()
    assert source.blocks.free == source.layout.blocks


@pytest.mark.parametrize("tokens", EDGES)
def test_pages_cover_every_layer_and_token_once(tokens: int, llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged, chunk_tokens=10)
    prompt = prompt_of(rng, tokens)
    for name in ("first", "again"):  # the second finds a prefix
        heard = rig.prefill(name, prompt, SamplingParams(max_tokens=2))
        rig.run()
        covered = Counter(
            (layer, token)
            for pages in heard.pages
            for layer in range(pages.first_layer, pages.first_layer + pages.layers)
            for token in range(pages.first_token, pages.first_token + pages.tokens)
        )
        assert covered == Counter((layer, token) for layer in range(rig.layout.layers) for token in range(tokens))
        assert len(heard.blocks) == rig.layout.blocks_for(tokens)


@pytest.mark.parametrize("kind", ["llama", "qwen3-window"])
def test_a_reused_prefix_changes_no_token(kind: str, pair: Callable[[str], Pair], rng: random.Random) -> None:
    models = pair(kind)
    source, target = Rig(models.paged, block_tokens=8, seed=1), Rig(models.paged, block_tokens=4, seed=2)
    common = prompt_of(rng, 40)
    for turn, (shared, extra) in enumerate([(40, 0), (40, 0), (40, 7), (17, 12), (16, 1), (39, 1), (7, 20)]):
        prompt = common[:shared] + prompt_of(rng, extra)
        found = split(source, target, {str(turn): prompt}, {str(turn): SamplingParams(max_tokens=9)})
        assert found[str(turn)] == generate(models.plain, prompt, 9)


def test_a_prefix_is_found_by_blocks_and_within_its_namespace_only(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged, block_tokens=8)
    prompt = prompt_of(rng, 32)
    params = SamplingParams()
    rig.prefill("first", prompt, params)
    rig.run()
    heard = {
        "same": rig.prefill("same", prompt, params),
        "longer": rig.prefill("longer", [*prompt, 1], params),
        "shorter": rig.prefill("shorter", prompt[:20], params),
        "other tenant": rig.prefill("other tenant", prompt, params, namespace="other"),
        "other start": rig.prefill("other start", [prompt[0] ^ 1, *prompt[1:]], params),
    }
    rig.run()
    cached = {name: recorder.cached_tokens for name, recorder in heard.items()}
    # Of the same prompt the last block is computed again: its last token's logits are needed.
    assert cached == {"same": 24, "longer": 32, "shorter": 16, "other tenant": 0, "other start": 0}


def test_decode_makes_prompt_and_answer_findable(llama: Pair, rng: random.Random) -> None:
    source, target = Rig(llama.paged), Rig(llama.paged, block_tokens=4)
    prompt = prompt_of(rng, 10)
    answer = split(source, target, {"a": prompt}, {"a": SamplingParams(max_tokens=13, ignore_eos=True)})["a"]
    written = [*prompt, *answer[:-1]]  # the last token is never fed to the model
    keys = block_keys(Namespace(""), FINGERPRINT, 4, [*written, 0, 0, 0, 0])
    assert target.blocks.acquire(OwnerId("reader"), keys, len(keys)).cached_blocks == len(written) // 4 == 5


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_sequences_get_the_same_tokens(kind: str, pair: Callable[[str], Pair], rng: random.Random) -> None:
    models = pair(kind)
    source = Rig(models.paged, seed=1)
    target = Rig(models.paged, block_tokens=4, blocks=14, chunk_tokens=9, seed=2)
    prompts = {str(i): prompt_of(rng, length) for i, length in enumerate((9, 12, 8, 11))}
    params = dict.fromkeys(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    recomputed = Counter[OwnerId]()
    acquire = target.blocks.acquire

    def counting(*arguments: object) -> object:
        recomputed[arguments[0]] += 1  # type: ignore[index]
        return acquire(*arguments)  # type: ignore[arg-type]

    for name in prompts:  # holds the blocks first: each of those counts once
        recomputed[decode_owner(RequestId(name))] -= 1
    target.blocks.acquire = counting  # type: ignore[assignment,method-assign]

    found = split(source, target, prompts, params)

    assert found == {name: generate(models.plain, prompt, 24, eos=[-1]) for name, prompt in prompts.items()}
    assert recomputed[decode_owner(RequestId("3"))] > 0
    assert recomputed[decode_owner(RequestId("0"))] == 0, "the oldest never gives way"
    assert target.blocks.free == 14


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_sampled_tokens_do_not_depend_on_who_draws_them(kind: str, pair: Callable[[str], Pair], rng: random.Random) -> None:
    models = pair(kind)
    source, target = Rig(models.paged, seed=1), Rig(models.paged, block_tokens=4, chunk_tokens=5, seed=2)
    prompts = {str(i): prompt_of(rng, rng.randint(1, 40)) for i in range(8)}
    params = {
        name: SamplingParams(temperature=rng.uniform(0.3, 2), top_p=rng.uniform(0.3, 1), top_k=rng.choice([0, 5, 40]),
                             seed=rng.randrange(2**64), max_tokens=10, ignore_eos=True)
        for name in prompts
    }  # fmt: skip
    found = split(source, target, prompts, params)
    for name, prompt in prompts.items():
        ids = list(prompt)
        for _ in range(10):
            ids.append(sample(next_logits(models.plain, ids), params[name], len(ids)).token_id)
        assert found[name] == ids[len(prompt) :]


def test_logprobs_are_those_of_the_whole_distribution(llama: Pair, rng: random.Random) -> None:
    rig = Rig(llama.paged)
    prompt = prompt_of(rng, 21)
    params = SamplingParams(temperature=0.7, top_k=3, seed=5, max_tokens=6, top_logprobs=4, ignore_eos=True)
    first = rig.prefill("a", prompt, params)
    rig.run()
    held = rig.hold("b", prompt)
    rig.tokens[:, :, list(held.blocks)] = rig.tokens[:, :, list(first.blocks)]
    rest = rig.decode("b", prompt, first.ids, params, held.blocks)
    rig.run()
    ids = list(prompt)
    assert len(first.tokens + rest.tokens) == 6
    for token in first.tokens + rest.tokens:
        expected = next_logits(llama.plain, ids).log_softmax(-1)
        assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-4)
        best = sorted(enumerate(expected.tolist()), key=lambda entry: -entry[1])[:4]
        assert [alternative.token_id for alternative in token.top] == [token_id for token_id, _ in best]
        assert [alternative.logprob for alternative in token.top] == pytest.approx([value for _, value in best], abs=1e-4)
        ids.append(token.token_id)


class _Ends:
    """What ends a generation, in one place for prefill and decode."""

    def __init__(self, models: Pair, prompt: list[int]) -> None:
        self._models, self._prompt = models, prompt

    def __call__(self, params: SamplingParams, context: int = 1024) -> tuple[list[int], FinishReason | None]:
        source, target = Rig(self._models.paged, context=context), Rig(self._models.paged, context=context)
        held = target.hold("a", self._prompt)
        first = source.prefill("a", self._prompt, params)
        source.run()
        if first.tokens[-1].finish:
            return first.ids, first.tokens[-1].finish
        target.tokens[:, :, list(held.blocks)] = source.tokens[:, :, list(first.blocks)]
        rest = target.decode("a", self._prompt, first.ids, params, held.blocks)
        target.run()
        assert target.blocks.free == target.layout.blocks
        return first.ids + rest.ids, rest.tokens[-1].finish


def test_what_ends_a_generation(llama: Pair, rng: random.Random) -> None:
    prompt = prompt_of(rng, 9)
    ends = _Ends(llama, prompt)
    free = generate(llama.plain, prompt, 12, eos=[-1])
    fresh = next(i for i in range(2, 12) if free[i] not in free[:i])  # a token that is not there before
    assert ends(SamplingParams(max_tokens=12, ignore_eos=True)) == (free, FinishReason.LENGTH)
    assert ends(SamplingParams(max_tokens=1, ignore_eos=True)) == (free[:1], FinishReason.LENGTH)
    assert ends(SamplingParams(max_tokens=2, ignore_eos=True)) == (free[:2], FinishReason.LENGTH)
    stopping = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(EOS, free[fresh]))
    assert ends(stopping) == (free[: fresh + 1], FinishReason.STOP)
    assert ends(SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(free[0],))) == (free[:1], FinishReason.STOP)
    assert ends(SamplingParams(max_tokens=12, ignore_eos=True), context=14) == (free[:5], FinishReason.LENGTH)
    assert ends(SamplingParams(max_tokens=12, ignore_eos=True), context=10) == (free[:1], FinishReason.LENGTH)


def test_eos_ends_a_generation_unless_it_is_ignored(llama: Pair, rng: random.Random) -> None:
    prompt = prompt_of(rng, 9)
    free = generate(llama.plain, prompt, 12, eos=[-1])
    eos = next(i for i in range(2, 12) if free[i] not in free[:i])
    ends = _Ends(Pair(replace(llama.paged, eos_token_ids=frozenset({free[eos], EOS})), llama.plain), prompt)
    assert ends(SamplingParams(max_tokens=12)) == (free[: eos + 1], FinishReason.STOP)
    assert ends(SamplingParams(max_tokens=12, ignore_eos=True)) == (free, FinishReason.LENGTH)
