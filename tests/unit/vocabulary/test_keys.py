"""Block keys: a chain that never confuses namespaces, models, block sizes or prefixes."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from kvferry.keys import Fingerprint, Namespace, block_keys, fingerprint_differences

MODEL = Fingerprint(model="LlamaForCausalLM", revision="r1", dtype="float32", rope="{}")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@given(TOKENS, TOKENS, st.integers(1, 20))
def test_keys_agree_exactly_as_far_as_the_tokens_do(ours: list[int], theirs: list[int], block_tokens: int) -> None:
    common = 0
    while common < min(len(ours), len(theirs)) and ours[common] == theirs[common]:
        common += 1
    a = block_keys(Namespace("n"), MODEL, block_tokens, ours)
    b = block_keys(Namespace("n"), MODEL, block_tokens, theirs)
    assert len(a) == len(ours) // block_tokens
    assert [x == y for x, y in zip(a, b, strict=False)] == [(i + 1) * block_tokens <= common for i in range(min(len(a), len(b)))]


@given(st.text(max_size=8), st.text(max_size=8), st.lists(st.integers(0, 9), min_size=8, max_size=16))
def test_namespaces_never_match(one: str, other: str, tokens: list[int]) -> None:
    a = block_keys(Namespace(one), MODEL, 4, tokens)
    b = block_keys(Namespace(other), MODEL, 4, tokens)
    assert bool(set(a) & set(b)) == (one == other)


def test_every_field_of_the_fingerprint_counts() -> None:
    tokens = list(range(8))
    keys = block_keys(Namespace(""), MODEL, 4, tokens)
    for field in fields(Fingerprint):
        other = replace(MODEL, **{field.name: "something else"})
        assert not set(keys) & set(block_keys(Namespace(""), other, 4, tokens)), field.name
        assert [difference.field for difference in fingerprint_differences(MODEL, other)] == [field.name]
        assert other.digest() != MODEL.digest()


def test_block_sizes_and_extra_keys_never_match() -> None:
    tokens = [1] * 16
    plain = set(block_keys(Namespace(""), MODEL, 4, tokens))
    assert not plain & set(block_keys(Namespace(""), MODEL, 8, tokens))
    assert not plain & set(block_keys(Namespace(""), MODEL, 4, tokens, (b"image",)))
    assert len(plain) == 4, "equal blocks at other places have other keys"


def test_fingerprint_survives_its_json() -> None:
    assert Fingerprint.from_json(MODEL.to_json()) == MODEL
