"""The load generator counts what a server sends, however its bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load import Reader, Told
from bench.serve import case, percentile

EVENTS = [
    *[
        b'data: {"choices":[{"text":"x"}],"usage":{"completion_tokens":%d}}\n\n' % count
        for count in (1, 2, 4)
    ],
    b"data: [DONE]\n\n",
]


def answer(events: list[bytes], status: bytes = b"200 OK") -> bytes:
    """A chunked answer, one chunk an event."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return b"HTTP/1.1 %b\r\ntransfer-encoding: chunked\r\n\r\n%b0\r\n\r\n" % (status, body)


def read(data: bytes, sizes: list[int], tokens: int = 4) -> Told:
    """What a reader makes of the bytes in parts of these sizes."""
    told = Told(began_s=0.0)
    reader = Reader(told, tokens)
    for size in sizes:
        reader.feed(data[:size])
        data = data[size:]
    reader.feed(data)
    assert reader.complete
    return told


@given(sizes=st.lists(st.integers(1, 60), max_size=10))
def test_tokens_are_counted_however_the_bytes_are_cut(sizes: list[int]) -> None:
    told = read(answer(EVENTS), sizes)
    assert (told.tokens, told.error, len(told.gaps_s())) == (4, "", 3)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (answer(EVENTS[:-1]), "without"),
        (answer([b'data: {"error":{"message":"broken"}}\n\n', EVENTS[-1]]), "broken"),
        (answer([b'{"error":1}'], b"429 Too Many Requests"), "status 429"),
        (answer([EVENTS[0], EVENTS[-1]]), "1 tokens came, 4"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(data: bytes, error: str) -> None:
    assert error in read(data, []).error


def test_figures_are_of_whole_answers_and_count_the_others() -> None:
    good = Told(0.0, [(0.5, 1), (0.6, 2), (0.8, 4)])
    figures = case([good, Told(error="x")], 2.0, 2)
    assert (figures["errors"], figures["output_tokens_per_s"], figures["ttft_ms_p50"]) == (1, 2.0, 500.0)
    assert figures["decode_tokens_per_s"] == pytest.approx(20.0)


def test_percentiles_are_by_nearest_rank() -> None:
    assert (percentile([3, 1, 2], 50), percentile([1, 2], 99), percentile([5], 1)) == (2, 2, 5)
