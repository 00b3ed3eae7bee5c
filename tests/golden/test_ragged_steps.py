"""Ragged steps: mixed batches, rollbacks, rows that don't depend on their neighbours."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.errors import PageAccounting
from engine.kernels.cpu import CpuOps
from engine.model.invariant import TileOps
from engine.runner.forward import store_relay
from tests.golden.driver import Driver, build
from tests.golden.tiny import random_tokens, reference_logits

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def prompts():
    """Four requests of different lengths."""
    return {slot: random_tokens(length, slot) for slot, length in ((1, 420), (2, 300), (3, 150), (4, 270))}


@pytest.fixture(scope="module")
def expected(reference, prompts):
    """The reference's logits of each."""
    return {slot: reference_logits(reference, tokens) for slot, tokens in prompts.items()}


@pytest.fixture(scope="module", params=[TileOps, CpuOps])
def invariant(request, config, weights):
    """A deterministic model on each set of row-invariant operations."""
    return build(config, weights, deterministic=True, ops=request.param())


def ragged(driver: Driver, prompts: dict[int, list[int]], seed: int) -> dict[int, torch.Tensor]:
    """Logits [n, V] of every prompt, run in random mixed steps of which random numbers of rows are kept.

    A step holds chunks, decode rows and verify rows; rows that are thrown away carry wrong tokens, as drafts
    that are rejected do.
    """
    chance = random.Random(seed)
    out: dict[int, list[torch.Tensor]] = {slot: [] for slot in prompts}
    for slot in prompts:
        driver.bind(slot)
    while unfinished := [slot for slot in prompts if driver.lengths[slot] < len(prompts[slot])]:
        groups, lens = [], []
        for slot in chance.sample(unfinished, chance.randint(1, len(unfinished))):
            left = len(prompts[slot]) - driver.lengths[slot]
            size = min(left, chance.choice([1, 1, 2, 3, 5, 6, 8, 9, 40, 131]))
            kept = chance.choice([size, size, chance.randint(0, size)])
            real = prompts[slot][driver.lengths[slot] :][:kept]
            groups.append((slot, real + random_tokens(size - kept, chance.randint(0, 1 << 30))))
            lens.append(kept)
        for (slot, _), kept, logits in zip(groups, lens, driver.run(groups, lens), strict=True):
            out[slot].append(logits[:kept])
    return {slot: torch.cat(rows) for slot, rows in out.items()}


@pytest.mark.parametrize("seed", range(4))
def test_mixed_steps_with_rollbacks_equal_the_reference(config, weights, prompts, expected, seed):
    for slot, logits in ragged(Driver(build(config, weights)), prompts, seed).items():
        assert (logits - expected[slot]).abs().max() < TOLERANCE


@pytest.mark.parametrize("seed", [0, 1])
def test_mixed_steps_with_rollbacks_change_no_bit(invariant, prompts, seed):
    """Deterministic mode: whatever ran beside a row, and whatever was thrown away before it."""
    for slot, logits in ragged(Driver(invariant), prompts, seed).items():
        assert torch.equal(logits, Driver(invariant).full(prompts[slot], [len(prompts[slot])]))


def test_a_forward_changes_no_committed_state(config, weights, prompts):
    """Pool rows below a request's length, rings, online states and lengths are the same bits afterwards."""
    driver = Driver(build(config, weights))
    driver.bind(1)
    driver.run([(1, prompts[1][:203])])
    state = driver.state
    page, window_page = int(state.full_table[1, 0]), int(state.window_table[1, 0])
    parts = {
        "c4": slice(page * 64, page * 64 + 203 // 4),
        "index": slice(page * 64, page * 64 + 203 // 4),
        "c128": slice(page * 2, page * 2 + 1),
        "window": slice(window_page * 256, window_page * 256 + 203),
        "c4_ring": slice(8, None),
        "c128_state": slice(3, None),
    }
    before = {name: state.pool(name)[:, part].clone() for name, part in parts.items()}
    driver.forward([(1, prompts[1][203:300])])
    assert all(torch.equal(state.pool(name)[:, part], before[name]) for name, part in parts.items())
    assert int(state.lengths[1]) == 203


def test_committing_nothing_leaves_the_request_as_it_was(config, weights, prompts, expected):
    driver = Driver(build(config, weights))
    driver.bind(2)
    driver.run([(2, prompts[2][:126])])
    driver.run([(2, random_tokens(7, 9))], lens=[0])
    logits = driver.run([(2, prompts[2][126:140])])[0]
    assert (logits - expected[2][126:140]).abs().max() < TOLERANCE


def test_a_slot_is_clean_for_its_next_request(config, weights, prompts, expected):
    """Even where the former request left numbers that aren't finite."""
    driver = Driver(build(config, weights))
    driver.bind(3)
    driver.run([(3, prompts[1][:261])])
    for name in ("c4_ring", "c128_state"):
        driver.state.pool(name)[:, 3 * driver.state.specs[name].page_rows :] = torch.nan
    for name in ("window", "c4", "index", "c128"):
        driver.state.pool(name)[:, driver.state.specs[name].page_rows :] = torch.nan
    driver.bind(3, generation=2)
    logits = torch.cat([driver.run([(3, prompts[3][at : at + 50])])[0] for at in range(0, 150, 50)])
    assert (logits - expected[3]).abs().max() < TOLERANCE


@pytest.mark.parametrize("length", [1, 3, 126, 127, 200, 255])
def test_a_decoded_row_has_the_same_bits_alone_and_in_a_mixed_step(invariant, prompts, length):

    def last_row(neighbours: bool) -> torch.Tensor:
        driver = Driver(invariant)
        for slot in prompts:
            driver.bind(slot)
        driver.run([(1, prompts[1][:length])])
        others = [(2, prompts[2][:61]), (3, prompts[3][:6]), (4, prompts[4][:1])] if neighbours else []
        return driver.run([*others[:2], (1, prompts[1][length : length + 1]), *others[2:]])[len(others[:2])]

    assert torch.equal(last_row(True), last_row(False))


def test_chunking_and_verifying_change_no_bit(invariant, prompts):
    """Deterministic mode: one chunk, odd chunks among neighbours, and verify rows give equal bits."""
    tokens = prompts[4]
    whole = Driver(invariant).full(tokens, [len(tokens)])
    driver = Driver(invariant)
    driver.bind(4)
    driver.bind(1)
    out, at, sizes = [], 0, [90, 1, 6, 6, 41, 2, 124]
    for size in sizes:
        out.append(driver.run([(1, prompts[1][at : at + 9]), (4, tokens[at : at + size])], lens=[0, size])[1])
        at += size
    assert torch.equal(torch.cat(out), whole)


def test_taps_are_stream_means_that_do_not_depend_on_the_chunks(config, weights, prompts):
    model = build(config, weights)

    def taps(chunks: list[int]) -> torch.Tensor:
        driver, out, at = Driver(model), [], 0
        driver.bind(3)
        for size in chunks:
            groups = [(3, prompts[3][at : at + size])]
            (plan, result), _ = driver.forward(groups, taps=(1, 5))
            out.append(result.pending.taps.clone())
            driver.run(groups)
            assert plan.batch.taps == (1, 5)
            at += size
        return torch.cat(out, dim=1)

    assert (taps([150]) - taps([60, 1, 89])).abs().max() < TOLERANCE


def test_a_page_boundary_with_its_snapshot_resumes_in_another_slot(config, weights, prompts, expected):
    """Shared full and window pages, the A-halves, and nothing else: no bit differs from going on."""
    driver = Driver(build(config, weights))
    state = driver.state
    driver.bind(1)
    driver.bind(2)
    driver.run([(1, prompts[1][:256])])
    rows, halves = state.snapshot_rows(1)
    pages = (int(state.full_table[1, 0]), int(state.window_table[1, 0]))
    assert rows.tolist() == list(range(pages[1] * 256 + 128, pages[1] * 256 + 256))
    state.map_pages(np.array([[2, 0, *pages]], dtype=np.int32))
    ring = state.pool("c4_ring").view(2, state.slots, 8, -1)
    ring[:, 2] = torch.nan
    ring[:, 2, 4:, : halves.shape[-1]] = halves
    driver.lengths[2], driver.mapped[2] = 256, 1
    chunks = [prompts[1][256:257], prompts[1][257:300], prompts[1][300:420]]
    on = torch.cat([driver.run([(1, chunk)])[0] for chunk in chunks])
    resumed = torch.cat([driver.run([(2, chunk)])[0] for chunk in chunks])
    assert torch.equal(on, resumed)
    assert (resumed - expected[1][256:]).abs().max() < TOLERANCE


def test_a_snapshot_off_a_page_boundary_is_refused(config, weights, prompts):
    driver = Driver(build(config, weights))
    driver.bind(1)
    driver.run([(1, prompts[1][:255])])
    with pytest.raises(PageAccounting, match="255 tokens"):
        driver.state.snapshot_rows(1)


def test_a_relay_token_is_the_token_that_it_stands_for(config, weights, prompts):
    """-1 takes what the last step left on the device for that slot."""
    driver = Driver(build(config, weights))
    for slot in (1, 2):
        driver.bind(slot)
        driver.run([(slot, prompts[slot][:20])])
    store_relay(driver.state, torch.tensor([2, 1]), torch.tensor([prompts[2][20], prompts[1][20]]))
    (_, named), _ = driver.forward([(1, prompts[1][20:21]), (2, prompts[2][20:23])])
    (_, relayed), _ = driver.forward([(1, [-1]), (2, [-1, *prompts[2][21:23]])])
    assert torch.equal(relayed.logits, named.logits)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_idle_step_runs_and_commits_nothing(config, weights, deterministic):
    assert Driver(build(config, weights, deterministic=deterministic)).run([]) == []
