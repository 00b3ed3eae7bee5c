"""The detokenizer's core: text, stop strings, bounds and terminal events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.actors.core import Effect, Send
from engine.actors.detok import SLOW_CLIENT, Detok
from engine.actors.stops import StopScan, first_match
from engine.messages import (
    ABORTED,
    FAILED,
    GOES_ON,
    LENGTH,
    STOP_EOS,
    STOP_STRING,
    STOP_TOKEN,
    Abort,
    Credit,
    Delta,
    Deltas,
    Ended,
    LogprobColumns,
    RequestFailed,
    StepOut,
    Stop,
    Watch,
)

EOS = 256


class ByteTable:
    """Token i < 256 is the byte i; 256 is EOS."""

    special_ids = frozenset([EOS])

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else bytes([token_id])


def step(rows: dict[int, tuple[bytes | list[int], int]], logprobs: LogprobColumns | None = None) -> StepOut:
    """A StepOut of these requests: id -> (tokens, finish code)."""
    tokens = [token for ids, _ in rows.values() for token in ids]
    return StepOut(
        epoch=0,
        rank=0,
        request_ids=np.array(list(rows), dtype=np.int64).tobytes(),
        counts=bytes(len(ids) for ids, _ in rows.values()),
        token_ids=np.array(tokens, dtype=np.int32).tobytes(),
        finish=bytes(finish for _, finish in rows.values()),
        logprobs=logprobs,
    )


class Listener:
    """Everything that a Detok says, by request."""

    def __init__(self, buffer: int = 1000) -> None:
        self.core = Detok(ByteTable(), buffer)
        self.deltas: dict[int, list[Delta]] = {}
        self.others: list[Send] = []

    def receive(self, msg: object) -> None:
        for effect in self.core.receive(msg):
            self._note(effect)
        assert self.core.buffers_are_bounded()

    def _note(self, effect: Effect) -> None:
        assert isinstance(effect, Send)
        if isinstance(effect.msg, Deltas):
            for delta in effect.msg.items:
                self.deltas.setdefault(delta.request_id, []).append(delta)
        else:
            self.others.append(effect)

    def watch(self, request_id: int = 1, stop: tuple[str, ...] = (), **more: object) -> None:
        self.receive(Watch(request_id=request_id, sink=request_id, stop=stop, **more))  # type: ignore[arg-type]

    def feed(self, tokens: bytes | list[int], finish: int = GOES_ON, request_id: int = 1) -> None:
        self.receive(step({request_id: (tokens, finish)}))

    def text(self, request_id: int = 1) -> str:
        return "".join(delta.text for delta in self.deltas.get(request_id, ()))

    def last(self, request_id: int = 1) -> Delta:
        return self.deltas[request_id][-1]


@given(
    text=st.text(alphabet="ab€🙂", max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=30),
)
def test_no_chunk_ends_inside_a_character_and_nothing_is_lost(text: str, sizes: list[int]) -> None:
    listener = Listener()
    listener.watch()
    rest = text.encode()
    for size in sizes:
        part, rest = rest[:size], rest[size:]
        listener.feed(part)
    listener.feed(rest[:200], LENGTH)
    assert "\ufffd" not in listener.text()
    assert listener.text() == text


def test_an_unfinished_character_at_the_end_is_shown_as_a_replacement() -> None:
    listener = Listener()
    listener.watch()
    listener.feed("€".encode()[:2], LENGTH)
    assert listener.text() == "\ufffd"


STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


@given(text=st.text(alphabet="abc", max_size=40), stops=STOPS, sizes=st.lists(st.integers(1, 6), min_size=1))
def test_a_stop_string_ends_the_text_however_the_tokens_are_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    """The text equals what a search in the whole text gives, and the rank is told."""
    listener = Listener()
    listener.watch(stop=tuple(stops))
    rest = text.encode()
    for size in sizes:
        part, rest = rest[:size], rest[size:]
        listener.feed(part)
    listener.feed(rest, LENGTH)
    match = first_match(text, stops)
    if match is None:
        assert listener.text() == text
        assert listener.last().finish == LENGTH
        return
    start, stop = match
    assert listener.text() == text[:start]
    assert (listener.last().finish, listener.last().matched) == (STOP_STRING, stop)
    ids = [token for delta in listener.deltas[1] for token in delta.token_ids]
    assert bytes(ids) == text[: start + len(stop)].encode()
    assert Send("rank0", Abort(1, STOP_STRING)) in listener.others


@given(pieces=st.lists(st.text(alphabet="ab", max_size=3), max_size=12), stops=STOPS)
def test_only_an_end_that_can_become_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    scan = StopScan(tuple(stops), keep=False)
    for piece in pieces:
        _, matched = scan.feed(piece)
        if matched is not None:
            break
        assert scan.held == "" or any(stop.startswith(scan.held) and stop != scan.held for stop in stops)


def test_of_two_stop_strings_the_one_that_completes_first_wins() -> None:
    listener = Listener()
    listener.watch(stop=("abcd", "bc"))
    listener.feed(b"xabcd")
    assert (listener.text(), listener.last().matched) == ("xa", "bc")


def test_a_stop_string_comes_before_the_length_limit_in_one_step() -> None:
    listener = Listener()
    listener.watch(stop=("b",))
    listener.feed(b"abc", LENGTH)
    assert (listener.text(), listener.last().finish, listener.last().token_ids) == (
        "a",
        STOP_STRING,
        (97, 98),
    )


def test_a_kept_stop_string_stays_in_the_text() -> None:
    listener = Listener()
    listener.watch(stop=("bc",), keep_stop=True)
    listener.feed(b"abcd")
    assert listener.text() == "abc"


def test_eos_and_stop_tokens_are_no_text() -> None:
    listener = Listener()
    listener.watch(1)
    listener.watch(2)
    listener.receive(step({1: ([97, EOS], STOP_EOS), 2: ([97, 98], STOP_TOKEN)}))
    assert listener.text(1) == "a"
    assert (listener.text(2), listener.last(2).matched) == ("a", 98)


def test_nothing_follows_the_terminal_event() -> None:
    """I11: late steps, failures, aborts and credits of an ended request say nothing."""
    listener = Listener()
    listener.watch()
    listener.feed(b"a", LENGTH)
    before = list(listener.others)
    for late in (
        step({1: (b"b", GOES_ON)}),
        RequestFailed(1, FAILED, 500, "x"),
        Abort(1),
        Credit(1, 1),
        Stop(),
    ):
        listener.receive(late)
    assert len(listener.deltas[1]) == 1
    assert listener.others == before == [Send("ingress", Ended(1, LENGTH))]


@pytest.mark.parametrize(
    ("msg", "finish", "status"),
    [(RequestFailed(1, FAILED, 500, "why"), FAILED, 500), (Abort(1), ABORTED, 499)],
)
def test_every_way_out_gives_one_terminal_event(msg: object, finish: int, status: int) -> None:
    listener = Listener()
    listener.watch()
    listener.receive(msg)
    assert [(delta.finish, delta.status) for delta in listener.deltas[1]] == [(finish, status)]
    assert listener.others == [Send("ingress", Ended(1, finish))]


def test_a_lagging_client_gets_merged_chunks_and_loses_nothing() -> None:
    listener = Listener(buffer=3)
    listener.watch()
    for _ in range(5):
        listener.feed(b"ab")
    assert len(listener.deltas[1]) == 3
    listener.receive(Credit(1, 3))
    assert len(listener.deltas[1]) == 4
    listener.feed(b"c", LENGTH)
    assert listener.text() == "ababababab" + "c"


def test_a_client_that_lags_beyond_the_bound_is_cut_off_and_its_rank_told() -> None:
    listener = Listener(buffer=2)
    listener.watch()
    listener.watch(2)
    for _ in range(5):
        listener.feed(b"a")
    listener.feed(b"b", LENGTH, request_id=2)
    assert (listener.last().finish, listener.last().message) == (ABORTED, SLOW_CLIENT)
    assert Send("rank0", Abort(1, ABORTED)) in listener.others
    assert listener.text(2) == "b"


def test_logprobs_go_with_their_tokens_and_end_at_the_stop_string() -> None:
    listener = Listener()
    listener.watch(1, stop=("b",))
    listener.watch(2)
    columns = LogprobColumns(
        chosen=np.array([-1, -2, -3, -4], dtype=np.float32).tobytes(),
        top_counts=bytes([0, 0, 0, 2]),
        top_ids=np.array([7, 8], dtype=np.int32).tobytes(),
        top_values=np.array([-0.5, -0.75], dtype=np.float32).tobytes(),
        prompt_rows=np.array([[1, 4]], dtype=np.int32).tobytes(),
        prompt_chosen=np.array([-9], dtype=np.float32).tobytes(),
        prompt_top_counts=bytes([0]),
    )
    listener.receive(step({1: (b"abc", GOES_ON), 2: (b"d", GOES_ON)}, columns))
    assert [entry.value for entry in listener.last(1).logprobs] == [-1.0, -2.0]
    assert listener.last(2).logprobs[0].top == ((7, -0.5), (8, -0.75))
    assert [(entry.position, entry.value) for entry in listener.last(2).prompt_logprobs] == [(4, -9.0)]
