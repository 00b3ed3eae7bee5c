"""Steps over recorded memory give the bits of eager ones, and nothing of one step stays for the next."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine.config import PAGE_TOKENS
from engine.errors import DeviceFailed
from engine.messages import RunStep, StepDone
from engine.model.model import DeepseekV4
from engine.runner.graph_layout import GraphKey
from engine.runner.graphs import Graphs
from engine.runner.step import StepRunner
from tests.runner.driver import Planned
from tests.runner.graph_pair import SLOTS, WIDTH, Pair, planned
from tests.runner.spec_driver import BLOCK, GREEDY, SpecDriver, plain_texts, prompt, scripted_driver


def closing(pair: Pair, counts: dict[int, int]) -> int:
    """How many c128 windows end in a step of so many rows of each slot."""
    return sum(
        (pair.lengths[slot] + count) // 128 - pair.lengths[slot] // 128 for slot, count in counts.items()
    )


@pytest.mark.parametrize(
    ("kernels", "seed", "steps"), [("tiles", 0, 5), ("native", 1, 30), ("native", 2, 30)]
)
def test_any_decode_and_verify_steps_are_bit_equal_to_eager_ones(
    request: pytest.FixtureRequest, kernels: str, seed: int, steps: int
) -> None:
    pair = Pair(request.getfixturevalue("model" if kernels == "tiles" else "native"), seed, taps=(1, 3))
    rng, closed = pair.rng, 0
    for slot, length in enumerate((126, 1, 254)[: steps // 2], 1):
        pair.join(slot, length)
    for number in range(steps):
        if number % 7 == 3:
            pair.join(rng.randint(1, SLOTS), rng.choice([2, 1, 124, 254, 500] if steps > 5 else [2, 124]))
        chosen = rng.sample(sorted(pair.lengths), rng.randint(2, len(pair.lengths)))
        widest = rng.choice([1, 1, WIDTH])
        counts = {slot: rng.randint(1, widest) for slot in chosen}
        closed += closing(pair, counts)
        pair.step(counts, {slot: rng.randint(count // 2, count) for slot, count in counts.items()})
    assert closed


def test_windows_close_at_any_place_of_a_verified_prefix(native: DeepseekV4) -> None:
    pair = Pair(native, 3)
    for phase in (2, 123, 126):
        pair.join(1, 1 + phase)
        pair.join(2, 120 + phase % 4)
        for width in range(1, WIDTH + 1):
            pair.step({1: width, 2: 1 + width % WIDTH}, {1: width // 2, 2: width % 2})


def test_lengths_up_to_the_largest_size_select_among_padded_entries(native: DeepseekV4) -> None:
    pair = Pair(native, 5)
    pair.join(2, 4 * PAGE_TOKENS - 10)
    pair.join(1, 1)
    while pair.lengths[2] < 4 * PAGE_TOKENS - WIDTH:
        pair.step({2: WIDTH, 1: 1}, {2: 2, 1: 1})
    pair.step({1: 1, 2: WIDTH}, {1: 1, 2: WIDTH})
    assert pair.lengths[2] == 4 * PAGE_TOKENS


def test_the_number_of_requests_may_be_none(native: DeepseekV4) -> None:
    pair = Pair(native, 6)
    pair.join(1, 5)
    before = {name: pair.recorded.state.pool(name).clone() for name in pair.recorded.state.specs}
    out = pair.recorded.run(RunStep(1, "idle", b"", b"", b"", b"", b"", b""), [], 4)
    assert out[0].shape == (0, native.config.vocab_size)
    for name, spec in pair.recorded.state.specs.items():
        own = pair.recorded.state.pool(name)
        assert torch.equal(own[:, spec.page_rows :], before[name][:, spec.page_rows :])


def test_memory_never_moves_and_a_step_over_moved_memory_is_refused(native: DeepseekV4) -> None:
    pair = Pair(native, 7)
    pair.join(1, 5)
    side = pair.recorded
    plan = planned(side, 4)
    first = side.path.run(plan)
    again = side.path.run(planned(side, 4))
    assert [first.pending.c4.data_ptr(), first.pending.c128.data_ptr()] == [
        again.pending.c4.data_ptr(), again.pending.c128.data_ptr(),
    ]  # fmt: skip
    side.state.relay = side.state.relay.clone()
    with pytest.raises(DeviceFailed, match="memory that has moved"):
        side.path.run(plan)


def test_a_plan_made_ahead_is_not_changed_by_the_step_before_it(native: DeepseekV4) -> None:
    pair = Pair(native, 8)
    pair.join(1, 5)
    side = pair.recorded
    wanted = side.path.run(planned(side, 4)).logits.clone()
    ahead = planned(side, 4)
    for bucket in (4, 8):
        assert not torch.equal(side.path.run(planned(side, bucket, token=77)).logits, wanted)
    assert torch.equal(side.path.run(ahead).logits, wanted)


def with_sizes(runner: StepRunner, width: int) -> StepRunner:
    """The runner with every size that its steps may have, up to 512 tokens a request."""
    taps = () if runner.speculation is None else runner.speculation.drafter.taps
    sizes = [GraphKey(rows, min(rows, SLOTS), 2, width) for rows in (4, SLOTS * width)]
    runner.path.graphs = Graphs(runner.model, runner.state, sizes, taps, lambda text: None)
    return runner


class Agreeing(SpecDriver):
    """Its decoding steps have a size that holds all their rows."""

    agreed = 0

    def run(self, planned: Planned) -> StepDone:
        step = planned.step
        if step.verify and all(step.verify):
            rows = sum(step.verify) if step.budget else len(step.verify)
            bucket = 4 if rows <= 4 else SLOTS * self.width
            self.agreed += 1
            planned = Planned(msgspec.structs.replace(step, bucket=bucket), planned.groups)
        return super().run(planned)


def test_rounds_of_drafts_in_recorded_steps_give_the_plain_text(native: DeepseekV4) -> None:
    prompts = {slot: prompt(length, slot) for slot, length in ((1, 3), (2, 124), (3, 60))}
    texts = plain_texts(native, prompts, 20)
    scripted, drafter = scripted_driver(native, "compact", next_tokens=True)
    driver = Agreeing(with_sizes(scripted.runner, BLOCK + 1))
    drafter.texts = texts
    drafter.wrong = {(slot, len(ids) + place) for slot, ids in prompts.items() for place in (4, 9, 10, 15)}
    streams = [driver.stream(slot, ids, GREEDY, len(texts[slot])) for slot, ids in prompts.items()]
    driver.round(*((stream, len(stream.prompt)) for stream in streams))
    driver.finish(*streams[:1], budget=0)
    driver.finish(*streams)
    assert driver.agreed > 20
    assert {stream.slot: stream.prompt + stream.output for stream in streams} == texts
