"""Two processes that write each other's memory: the way to experts by it, beside that by collectives."""

from __future__ import annotations

import multiprocessing
import tempfile
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.near_experts import NearExperts, NearRows
from engine.kernels.near_planes import bytes_for, rows_within
from engine.kernels.triton_ops import TritonOps
from engine.model.config import ModelConfig
from engine.model.expert_layout import laid_experts
from engine.model.expert_weights import MoeWeights
from engine.model.groups import Near
from engine.model.parallel import Experts, SpreadExperts
from engine.model.quantised import Fp4Experts
from engine.runner.collectives import close_groups, open_groups
from engine.runner.near import open_near
from tests.kernels.triton.cases import DEVICE, fp4_weight, seeded, values
from tests.kernels.triton.check_ops import FIELDS

RANKS, SILENT_S = 2 if DEVICE == "cuda" else 3, 120.0
HIDDEN, INNER, EXPERTS, CHOICES = 384, 128, 12, 3
ROOM = 2 << 20 if DEVICE == "cuda" else bytes_for(RANKS, 90, HIDDEN, CHOICES)
FITS = rows_within(ROOM, RANKS, HIDDEN, CHOICES)
STEPS = (
    (1, (1, 1, 1)), (3, (2, 3, 1)), (3, (0, 1, 0)), (3, (3, 0, 2)), (90, (90, 2, 7)), (1, (1, 0, 1)),
    (FITS + 1, (5, 2, 0)),
)  # fmt: skip
"""Agreed rows, and each rank's own. The fifth step counts choices first, the last has no room in a region."""


def compare() -> list[str]:
    """Each rank's word, by rank: "the same", or what failed."""
    context = multiprocessing.get_context("spawn")
    regions = [torch.zeros(ROOM, dtype=torch.uint8).share_memory_() for _ in range(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(RANKS):
            near, far = context.Pipe()
            work = (rank, f"file://{folder}/meet", regions, far)
            process = context.Process(target=live, args=work, daemon=True)
            process.start()
            far.close()
            ranks.append((near, process))
        try:
            return [pipe.recv() if pipe.poll(SILENT_S) else "silent" for pipe, _ in ranks]
        except EOFError:
            return ["gone"]
        finally:
            for _, process in ranks:
                process.kill()
                process.join()


def live(rank: int, meet_at: str, regions: list[Tensor], pipe: multiprocessing.connection.Connection) -> None:
    """A rank's process."""
    torch.set_num_threads(1)
    device = torch.device(DEVICE, rank if DEVICE == "cuda" else None)
    groups = open_groups(rank, RANKS, RANKS, device, meet_at, SILENT_S)
    if DEVICE == "cuda":
        groups = open_near(groups, device, ROOM, SILENT_S, print)
    else:
        groups = replace(groups, ep=replace(groups.ep, near=Near(tuple(regions), SILENT_S)))
    assert groups.ep.near is not None
    first, ops = rank * EXPERTS // RANKS, TritonOps(device)
    config = ModelConfig.from_dict(
        {**FIELDS, "hidden_size": HIDDEN, "n_routed_experts": EXPERTS, "num_experts_per_tok": CHOICES}
    )
    direct = ops.near_experts(groups.ep, first, config)
    assert isinstance(direct, NearExperts)
    told, moe = "the same", experts_of(first)
    for step, (rows, own) in enumerate(STEPS):
        ways = (SpreadExperts(groups.ep, first), direct)
        wanted, out = (sums(way, ops, moe, 10 * step + rank, own[rank], rows) for way in ways)
        if not torch.equal(wanted, out):
            told = f"step {step} differs by {float((wanted.float() - out.float()).abs().max())}"
            break
    ops.check()
    del direct, ways
    pipe.send(told)
    close_groups(groups)


def experts_of(first: int) -> MoeWeights:
    """A layer with this rank's share of the same experts everywhere; only `routed` and `gate` are read."""
    w13, s13 = fp4_weight(1, EXPERTS, 2 * INNER, HIDDEN)
    w2, s2 = fp4_weight(2, EXPERTS, HIDDEN, INNER)
    own = slice(first, first + EXPERTS // RANKS)
    routed = laid_experts(
        w13[own].contiguous(), s13[own].contiguous(), w2[own].contiguous(), s2[own].contiguous()
    )
    assert isinstance(routed, Fp4Experts)
    empty = torch.empty(0, device=DEVICE)
    return MoeWeights(
        gate=torch.empty(EXPERTS, HIDDEN, device=DEVICE), bias=empty, table=None, routed=routed,
        shared_w13=empty, shared_w2=empty,
    )  # fmt: skip


def sums(way: Experts, ops: TritonOps, moe: MoeWeights, seed: int, count: int, rows: int) -> Tensor:
    """What one layer's experts give to a rank's random rows, some of whose choices are none."""
    x, shared = values(seed, count, HIDDEN), values(seed + 1, count, HIDDEN)
    ids = torch.randint(
        -1, EXPERTS, (count, CHOICES), generator=seeded(seed), device=DEVICE, dtype=torch.int32
    )
    weights = torch.rand(count, CHOICES, generator=seeded(seed), device=DEVICE)
    sent = way.send(ops, x, ids, weights, rows, moe)
    assert isinstance(sent, NearRows) == (isinstance(way, NearExperts) and rows <= FITS)
    given = way.run(ops, sent, moe, 10.0)
    return way.back(ops, sent, given, shared)
