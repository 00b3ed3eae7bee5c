"""Layouts and frames alone: what is refused, for any numbers."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import (
    DescriptorCount,
    DescriptorError,
    DescriptorFrame,
    DescriptorSpan,
    DescriptorVersion,
    EngineError,
)
from engine.transport import LARGEST_BATCH, LARGEST_POOL, Kind, Layout
from engine.transport.checks import CODES
from engine.transport.frames import FRAME_BYTES, Frame

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SMALL = st.integers(-1, 9)
FRAMES = st.builds(
    Frame,
    kind=st.integers(0, 2**16 - 1),
    code=st.integers(0, 2**16 - 1),
    session=st.binary(min_size=16, max_size=16),
    source=U32,
    target=U32,
    index=U32,
    count=U32,
    generation=U64,
    offset=U64,
    size=U64,
    pool_bytes=U64,
    granularity=U64,
    device=st.binary(min_size=16, max_size=16),
    pid=U32,
    start_ticks=U64,
)


@given(spans=st.lists(st.tuples(SMALL, SMALL), max_size=6), unit=st.sampled_from([1, 2, 3, 4]), pool=SMALL)
def test_a_layout_is_refused_exactly_where_bytes_are_shared_cut_or_outside(
    spans: list[tuple[int, int]], unit: int, pool: int
) -> None:
    bytes_used = [range(offset, offset + size) for offset, size in spans]
    used = [b for one in bytes_used for b in one]
    good = (
        len(spans) > 0
        and unit != 3
        and pool > 0
        and all(size > 0 and offset % unit == 0 and size % unit == 0 for offset, size in spans)
        and len(used) == len(set(used))
        and all(0 <= b < pool for b in used)
    )
    if good:
        Layout(Kind.MEMFD, tuple(spans), pool, unit)
        return
    with pytest.raises((DescriptorSpan, DescriptorCount)):
        Layout(Kind.MEMFD, tuple(spans), pool, unit)


def test_sizes_that_would_wrap_around_are_refused() -> None:
    top = 2**64 - 4096
    for spans, pool in ((((top, 8192),), 2**62), (((0, 4096),), LARGEST_POOL + 1), (((4096, top),), 2**62)):
        with pytest.raises(DescriptorSpan):
            Layout(Kind.MEMFD, spans, pool, 4096)
    with pytest.raises(DescriptorCount):
        Layout(Kind.MEMFD, tuple((i, 1) for i in range(LARGEST_BATCH + 1)), 2**20, 1)


@given(frame=FRAMES)
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    data = frame.encode()
    assert len(data) == FRAME_BYTES
    assert astuple(Frame.decode(data)) == astuple(frame)


@given(frame=FRAMES, bit=st.integers(0, 8 * FRAME_BYTES - 1))
def test_a_flipped_bit_is_found(frame: Frame, bit: int) -> None:
    data = bytearray(frame.encode())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DescriptorVersion if bit // 8 in (8, 9) else DescriptorFrame):
        Frame.decode(bytes(data))


@given(data=st.binary(max_size=2 * FRAME_BYTES))
def test_other_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises((DescriptorFrame, DescriptorVersion)):
        Frame.decode(data)


def test_every_error_has_a_code() -> None:
    def below(kind: type[EngineError]) -> set[type[EngineError]]:
        return {kind}.union(*(below(one) for one in kind.__subclasses__()))

    assert set(CODES) == below(DescriptorError)
    assert len(CODES) == len(set(CODES))
