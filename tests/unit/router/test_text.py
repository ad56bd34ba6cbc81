"""Streamed text against the slow and obvious: decode everything, then search it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvferry.generation import FinishReason, Token
from kvferry.router.text import Detokenizer, StopFilter, TextStream

TEXTS = st.text(st.sampled_from("abßé你好🙂🇩🇪\N{REPLACEMENT CHARACTER} \n"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abé你🙂 "), min_size=1, max_size=4), max_size=4)


class Bytes:
    """A vocabulary whose tokens are arbitrary bytes: the text of ids is that of the bytes joined."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = parts

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._parts[index] for index in ids).decode(errors="replace")


def cut(data: bytes, edges: Sequence[int]) -> list[bytes]:
    places = sorted({0, len(data), *(edge % (len(data) + 1) for edge in edges)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that is complete first, tried character by character."""
    for end in range(1, len(text) + 1):
        done = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(done)]
    return None


@given(TEXTS, st.lists(st.integers(0, 200), max_size=60))
def test_characters_split_over_tokens_come_out_whole(text: str, edges: list[int]) -> None:
    parts = cut(text.encode(), edges)
    detokenizer = Detokenizer(Bytes(parts).decode)
    pieces = [detokenizer.push(index) for index in range(len(parts))]
    assert "".join(pieces) + detokenizer.finish() == text
    # What is given out is never late by more than a character's bytes.
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert text.startswith("".join(pieces))
        assert len(text.encode()) - len("".join(pieces).encode()) <= 3


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=30))
def test_bytes_that_are_no_text_come_out_as_the_whole_decodes(parts: list[bytes]) -> None:
    tokens = Bytes(parts)
    detokenizer = Detokenizer(tokens.decode)
    text = "".join(detokenizer.push(index) for index in range(len(parts))) + detokenizer.finish()
    assert text == tokens.decode(range(len(parts)))


def test_byte_fallback_may_take_a_run_back() -> None:
    """Some decoders show a run of bytes as characters only when all of the run is valid."""
    parts = [bytes([byte]) for byte in "你好a".encode()]

    def decode(ids: Sequence[int]) -> str:
        data = b"".join(parts[index] for index in ids)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(data)

    detokenizer = Detokenizer(decode)
    assert [detokenizer.push(index) for index in range(7)] == ["", "", "你", "", "", "好", "a"]


def test_decoders_that_look_at_the_token_before() -> None:
    words = ["▁the", "▁fox", "es", "▁run"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[index] for index in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(decode)
    assert [detokenizer.push(index) for index in range(4)] == ["the", " fox", "es", " run"]


@given(TEXTS, STOPS, st.lists(st.integers(0, 200), max_size=30))
def test_stop_strings_against_the_whole_text(text: str, stops: list[str], edges: list[int]) -> None:
    places = sorted({0, len(text), *(edge % (len(text) + 1) for edge in edges)})
    chunks = [text[start:end] for start, end in itertools.pairwise(places)]
    stop_filter = StopFilter(stops)
    sent = ""
    for chunk in chunks:
        sent += stop_filter.push(chunk)
        # No character of a stop string that will be complete is ever out.
        expected = first_stop(text, stops)
        assert (text if expected is None else expected).startswith(sent)
    if not stop_filter.stopped:
        sent += stop_filter.finish()
    expected = first_stop(text, stops)
    assert sent == (text if expected is None else expected)
    assert stop_filter.stopped == (expected is not None)


@given(TEXTS.filter(bool), STOPS, st.lists(st.integers(0, 200), max_size=60), st.sampled_from(FinishReason))
def test_a_stream_of_tokens(text: str, stops: list[str], edges: list[int], finish: FinishReason) -> None:
    parts = cut(text.encode(), edges)
    stream = TextStream(Bytes([*parts, b"<end>"]).decode, stops)
    tokens = [Token(index) for index in range(len(parts))]
    if finish is FinishReason.STOP:
        tokens.append(Token(len(parts), finish=FinishReason.STOP))  # shown to nobody
    else:
        tokens[-1] = Token(len(parts) - 1, finish=FinishReason.LENGTH)
    sent, ended = "", None
    for token in tokens:
        piece = stream.push(token)
        sent += piece.text
        ended = piece.finish
        if ended:
            break
    expected = first_stop(text, stops)
    assert sent == (text if expected is None else expected)
    assert ended is (FinishReason.STOP if expected is not None else finish)
