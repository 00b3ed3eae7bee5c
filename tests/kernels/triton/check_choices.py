"""Choices by kernels against choices by plain torch: of the same logits the same tokens, round by round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.errors import BadRequest
from engine.kernel_sets import choices
from engine.kernels.triton_ops import TritonOps
from engine.messages import MAX_BIASES, Sampling, SlotBind
from engine.model.draft import BlockChoose
from engine.model.ops import TorchOps
from engine.runner.acceptance import Accepted
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.choices import Choices, PlainChoices
from engine.runner.device_choices import DeviceChoices
from engine.runner.edits import MaskWords
from engine.runner.sampling import Rows
from tests.kernels.triton.cases import DEVICE, seeded
from tests.kernels.triton.sampling_cases import EOS, normal_logits

GAMMA, PROMPT = 3, (3, 5, 3)


def any_sampling(draw: random.Random) -> Sampling:
    """Each feature with a chance of its own."""

    def maybe(value: float, default: float = 0.0) -> float:
        return value if draw.random() < 0.35 else default

    return Sampling(
        max_new_tokens=64,
        temperature=draw.choice([0.0, 0.4, 1.0, 1.7]),
        top_k=int(maybe(draw.choice([1, 3, 40]))),
        top_p=maybe(draw.uniform(0.2, 0.95), 1.0),
        min_p=maybe(draw.uniform(0.01, 0.2)),
        repetition_penalty=maybe(draw.uniform(0.7, 1.6), 1.0),
        frequency_penalty=maybe(draw.uniform(-1, 1)),
        presence_penalty=maybe(draw.uniform(-1, 1)),
        logit_bias=tuple((draw.randrange(70), draw.uniform(-4, 4)) for _ in range(int(maybe(3)))),
        min_new_tokens=int(maybe(6)),
        stop_token_ids=(2, 9),
        seed=draw.randrange(1 << 40),
        seeded=draw.random() < 0.3,
        logprobs=int(maybe(2, -1)),
    )


def any_mask(draw: random.Random, rows: int, columns: int) -> MaskWords | None:
    """Of some of the rows, each allowing some three quarters of the tokens; often of none."""
    chosen = sorted(draw.sample(range(rows), draw.randrange(rows + 1)))
    if not chosen or draw.random() < 0.3:
        return None
    words = [[draw.getrandbits(32) | draw.getrandbits(32) for _ in range(0, columns, 32)] for _ in chosen]
    bits = np.array(words, np.uint32).view(np.int32)
    return MaskWords(torch.from_numpy(bits).to(DEVICE), np.array(chosen, np.int64))


def rows_and_drafts(seed: int, lens: Sequence[int], columns: int) -> tuple[Tensor, Tensor]:
    """Sharp logits [M, V] of groups of so many rows, and draft logits [GAMMA, B, V] near them."""
    rows = normal_logits(seed, sum(lens), columns, 4.0)
    z = normal_logits(seed + 1000, GAMMA * len(lens), columns, 0.7).view(GAMMA, len(lens), columns)
    first = 0
    for group, own in enumerate(lens):
        z[: max(own - 1, 0), group] += rows[first : first + max(own - 1, 0)]
        first += own
    return rows, z


class Pair:
    """The two ways with the same requests in slots 1 .. n."""

    def __init__(self, vocab_size: int, samplings: Sequence[Sampling]) -> None:
        device, count = torch.device(DEVICE), len(samplings)
        self.slots = tuple(range(1, count + 1))
        self.lengths = [len(PROMPT)] * count
        self.ways: list[Choices] = [
            choices(ops, count + 1, vocab_size, (EOS,), device) for ops in (TorchOps(), TritonOps(device))
        ]
        for slot, sampling in zip(self.slots, samplings, strict=True):
            self.bind(slot, sampling)

    def bind(self, slot: int, sampling: Sampling) -> None:
        """A request of the same prompt, whose child number is the slot's."""
        self.lengths[slot - 1] = len(PROMPT)
        tokens = np.asarray(PROMPT, np.int32).tobytes()
        for way in self.ways:
            way.bind(SlotBind(slot, 0, slot, slot, sampling, len(PROMPT), tokens))

    def sample(self, logits: Tensor, slots: Sequence[int], mask: MaskWords | None = None) -> list[int]:
        """A token of each slot, by both."""
        rows = Rows(tuple(slots), tuple(self.lengths[slot - 1] for slot in slots))
        plain, kernels = (way.sample(logits.clone(), rows, mask) for way in self.ways)
        assert kernels.tokens.tolist() == plain.tokens.tolist()
        assert kernels.valid.tolist() == plain.valid.tolist()
        for slot in slots:
            self.lengths[slot - 1] += 1
        return plain.tokens.tolist()

    def draft(self, z: Tensor) -> Tensor:
        """Drafts int64 [B, GAMMA] of logits [GAMMA, B, V], by both."""
        plain, kernels = (way.choose(self.slots, self.lengths) for way in self.ways)
        ids = torch.stack([plain(k, z[k]) for k in range(GAMMA)], 1)
        assert torch.stack([kernels(k, z[k].clone()) for k in range(GAMMA)], 1).tolist() == ids.tolist()
        return ids

    def accept(
        self, logits: Tensor, lens: Sequence[int], ids: Tensor, q: Tensor | None, mask: MaskWords | None
    ) -> Accepted:
        """One round of all slots, by both."""
        rows = VerifyRows(self.slots, tuple(self.lengths), np.array(lens, np.int64), ids, q)
        plain, kernels = (way.accept(logits.clone(), rows, mask) for way in self.ways)
        assert kernels.counts.tolist() == plain.counts.tolist()
        assert kernels.tokens.tolist() == plain.tokens.tolist()
        assert kernels.valid.tolist() == plain.valid.tolist()
        for group, count in enumerate(plain.counts.tolist()):
            self.lengths[group] += count
        return plain


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_of_requests_gets_the_same_tokens(seed: int) -> None:
    """Rounds of drafts between plain steps: what penalties count in one shows in the next."""
    draw, count, columns = random.Random(seed), 5, (70, 90, 150)[seed]
    pair = Pair(columns, [any_sampling(draw) for _ in range(count)])
    accepted, rejected = 0, 0
    for number in range(2):
        some = draw.sample(pair.slots, 3)
        pair.sample(normal_logits(10 * seed + number, 3, columns), some, any_mask(draw, 3, columns))
        lens = [draw.choice([0, 1, 2, GAMMA, GAMMA + 1]) for _ in range(count)]
        rows, z = rows_and_drafts(10 * seed + number, lens, columns)
        ids = pair.draft(z)
        q, mask = z.transpose(0, 1) if number else None, any_mask(draw, len(rows), columns)
        emitted = pair.accept(rows, lens, ids, q, mask).counts.tolist()
        accepted += sum(max(0, own - 1) for own in emitted)
        rejected += sum(0 < own < width for own, width in zip(emitted, lens, strict=True))
        # A request ends, and another one has its slot.
        pair.bind(draw.choice(pair.slots), any_sampling(draw))
    assert min(accepted, rejected) > 0


def test_a_block_is_accepted_with_the_statistics_that_it_was_drafted_with() -> None:
    """The block's logits are biased in place: they are what its drafts were drawn from."""
    columns, mix = 290, [Sampling(64, seed=1), Sampling(64, temperature=0.0), Sampling(64, seed=3, top_k=4)]
    pair = Pair(columns, mix)
    w1, w2 = (torch.randn(columns, 8, generator=seeded(seed), device=DEVICE) for seed in (1, 2))
    plain, kernels = (way.choose(pair.slots, pair.lengths) for way in pair.ways)
    assert isinstance(kernels, BlockChoose)
    assert not isinstance(plain, BlockChoose)
    anchors = torch.tensor([4, 5, 6], device=DEVICE)
    logits = normal_logits(1, GAMMA * 3, columns).view(GAMMA, 3, columns)
    before = logits.clone()
    ids, stats = kernels.block(logits, anchors, w1, w2)
    previous = anchors
    for k in range(GAMMA):
        z = before[k] + w1[previous] @ w2.t()
        assert torch.allclose(z, logits[k], atol=1e-4)
        previous = plain(k, logits[k])
        assert ids[:, k].tolist() == previous.tolist()
    lens = np.full(3, GAMMA + 1)
    rows = normal_logits(2, 3 * (GAMMA + 1), columns)
    q = logits.transpose(0, 1)
    found = [
        way.accept(rows.clone(), VerifyRows(pair.slots, tuple(pair.lengths), lens, ids, q, own))
        for way, own in zip([pair.ways[0], pair.ways[1], pair.ways[1]], [None, stats, None], strict=True)
    ]
    assert found[0].tokens.tolist() == found[1].tokens.tolist() == found[2].tokens.tolist()


def test_what_log_probabilities_are_read_from_is_never_edited() -> None:
    asking = Sampling(64, temperature=0.0, logit_bias=((7, 50.0),), logprobs=1)
    pair = Pair(70, [asking])
    rows = normal_logits(3, 1, 70)
    before = rows.clone()
    plain, kernels = (way.sample(rows, Rows((1,), (3,))) for way in pair.ways)
    assert plain.tokens.tolist() == kernels.tokens.tolist() == [7]
    assert torch.equal(rows, before)
    mask = MaskWords(torch.tensor([[1 << 9, 0, 0]], dtype=torch.int32, device=DEVICE), np.zeros(1, np.int64))
    masked = [way.sample(rows, Rows((1,), (3,)), mask).tokens.tolist() for way in pair.ways]
    assert masked == [[9], [9]]
    assert torch.equal(rows, before)
    found = [way.logprobs(rows, plain.tokens, [2]) for way in pair.ways]
    assert found[0].ids.tolist() == found[1].ids.tolist()
    # Sums of 70 exponentials in another order.
    assert torch.allclose(found[0].chosen, found[1].chosen, atol=1e-5)
    assert torch.allclose(found[0].values, found[1].values, atol=1e-5)


def test_a_group_that_cant_be_judged_leaves_the_others_as_they_are() -> None:
    """One slot was never bound: all at once raises before anything is edited; one by one the rest go on."""
    mix = [Sampling(64, seed=1, frequency_penalty=0.5), Sampling(64, seed=2)]
    pair = Pair(70, mix)
    rows, z = normal_logits(1, 3 * 2, 70), normal_logits(2, GAMMA * 3, 70).view(GAMMA, 3, 70)
    before, ids = rows.clone(), torch.zeros(3, GAMMA, dtype=torch.int64, device=DEVICE)
    wanted = VerifyRows((1, 0, 2), (3, 3, 3), np.array([2, 2, 2]), ids, z.transpose(0, 1))
    for way in pair.ways:
        with pytest.raises(BadRequest, match="slot 0 is sampled before it is bound"):
            way.accept(rows, wanted)
    assert torch.equal(rows, before)
    for group in (0, 2):
        own = rows[2 * group : 2 * group + 2]
        plain, kernels = (way.accept(own.clone(), wanted.only(group)) for way in pair.ways)
        assert plain.tokens.tolist() == kernels.tokens.tolist()


class Recorder(TorchDispatchMode):
    """Every operation on tensors, and the shapes of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen.append((str(func), [one.shape for one in tree_leaves(out) if isinstance(one, Tensor)]))
        return out


READS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default"}
"""What makes the host wait for numbers of the device, or the device's memory depend on them."""


def test_what_is_launched_depends_on_no_number_of_the_device() -> None:
    """Greedy rows, draws, cuts and penalties; drafts accepted, rejected and rows that fail."""
    mix = [
        Sampling(64, temperature=0.0, presence_penalty=0.5),
        Sampling(64, seed=1),
        Sampling(64, seed=2, top_p=0.7),
        Sampling(64, seed=3, seeded=True),
    ]
    lens = np.array([3, 4, 0, 2])
    recorded = []
    for seed, scale in ((1, 1.0), (2, torch.nan)):
        way = Pair(70, mix).ways[1]
        rows, z = rows_and_drafts(seed, lens.tolist(), 70)
        rows, ids = rows * scale, z.argmax(-1).t()
        with Recorder() as found:
            way.choose((1, 2, 3, 4), (3, 3, 3, 3))(1, z[1])
            way.accept(rows, VerifyRows((1, 2, 3, 4), (3, 3, 3, 3), lens, ids, z.transpose(0, 1)))
            way.sample(z[0] * scale, Rows((1, 2, 3, 4), (9, 9, 9, 9)))
        recorded.append(found.seen)
    assert recorded[0] == recorded[1]
    assert not READS & {name for name, _ in recorded[0]}
    with Recorder() as plain:
        Pair(70, mix).ways[0].sample(z[0], Rows((1, 2, 3, 4), (9, 9, 9, 9)))
    assert READS & {name for name, _ in plain.seen}, "reads are seen"


def test_requests_that_a_table_cant_hold_are_refused() -> None:
    pair = Pair(70, [])
    bias = tuple((token % 70, 1.0) for token in range(MAX_BIASES + 1))
    prompt = np.asarray([3, 70], np.int32).tobytes()
    refused = [
        (SlotBind(0, 0, 1, 0, Sampling(1, logit_bias=bias), 1, prompt), "1025 tokens, 1024 at most"),
        (SlotBind(0, 0, 1, 0, Sampling(1, presence_penalty=1.0), 2, prompt), "outside the vocabulary"),
        (SlotBind(0, 0, 1, 0, Sampling(1, presence_penalty=1.0), 3, prompt), "need all 3 prompt tokens"),
    ]
    for bind, message in refused:
        with pytest.raises(BadRequest, match=message):
            pair.ways[1].bind(bind)


def test_the_kernel_set_says_what_chooses() -> None:
    plain, kernels = Pair(70, []).ways
    assert isinstance(plain, PlainChoices)
    assert isinstance(kernels, DeviceChoices)
    assert (plain.name, kernels.name) == ("torch", "triton")
