"""Two ranks whose recorded steps have collectives: each step against the eager one, then the end in order."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from engine.kernels.cpu import CpuOps
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import ModelConfig
from engine.model.dummy import DummyWeights
from engine.model.groups import Groups
from engine.model.layout import DEEPSEEK_LAYOUT, FLOAT_LAYOUT
from engine.model.model import DeepseekV4
from engine.model.share import share_of
from engine.runner.batch import build_batch
from engine.runner.collectives import close_groups, open_groups
from engine.runner.forward import commit_step
from engine.runner.graph_layout import GraphKey
from engine.runner.graph_path import TargetPath
from engine.runner.graphs import Graphs
from engine.runner.near import open_near
from tests.kernels.triton.check_ops import FIELDS

RANKS, SILENT_S, END_S = 2, 60.0, 60.0
ROWS, CPU_APART = 3, 1e-5
KEYS = [GraphKey(ROWS, 2, 1, 2), GraphKey(1, 1, 1, 2)]
STEPS = ((5, (1, 1)), (6, (2, 1)), (8, (1,)))
"""First position of all requests, and rows of each; the ranks' numbers differ in the last one."""


def told_by_ranks(device: str, shared: bool = False) -> Iterator[str]:
    """A line for each thing that both ranks have shown. raises RuntimeError with a rank's words

    shared  experts' rows go by memory of the devices, not by collectives
    """
    # Both ranks are on this host: the loopback interface is there whatever else is.
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(RANKS):
            near, far = context.Pipe()
            process = context.Process(
                target=live, args=(rank, device, shared, f"file://{folder}/meet", far), daemon=True
            )
            process.start()
            far.close()
            ranks.append((near, process))
        try:
            while (line := _same([_next(rank, pipe) for rank, (pipe, _) in enumerate(ranks)])) != "closed":
                yield line
            for rank, (_, process) in enumerate(ranks):
                process.join(END_S)
                if process.exitcode != 0:
                    told = "still runs" if process.exitcode is None else f"ended with {process.exitcode}"
                    raise RuntimeError(f"rank {rank} {told}, {END_S:g} s after its groups were closed")
            yield "graphs, then caches, then groups, then processes: all ended with 0"
        finally:
            for _, process in ranks:
                process.kill()
                process.join()


def _next(rank: int, pipe: Connection) -> str:
    if not pipe.poll(SILENT_S + 30):
        raise RuntimeError(f"rank {rank} is silent")
    try:
        kind, line = pipe.recv()
    except EOFError as error:
        raise RuntimeError(f"rank {rank} is gone") from error
    if kind == "failed":
        raise RuntimeError(f"rank {rank}: {line}")
    return str(line)


def _same(lines: list[str]) -> str:
    if len(set(lines)) != 1:
        raise RuntimeError(f"ranks tell different things: {lines}")
    return lines[0]


def live(rank: int, device: str, shared: bool, meet_at: str, pipe: Connection) -> None:
    """A rank's process: what it shows, then the end in the order of a server's."""
    torch.set_num_threads(1)
    try:
        where = torch.device(device, rank if device == "cuda" else None)
        groups = open_groups(rank, RANKS, RANKS, where, meet_at, SILENT_S)
        if shared:
            groups = open_near(groups, where, 1 << 20, SILENT_S, print)
            assert groups.ep.near is not None
        graphs = _shown(groups, where, pipe)
        graphs.close()
        del graphs
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        close_groups(groups)
        pipe.send(("line", "closed"))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise


def _shown(groups: Groups, device: torch.device, pipe: Connection) -> Graphs:
    """Captures, then compares each step; returns the graphs, which live until they are closed."""
    model = _model(groups, device)
    sides = [TargetPath(model, _state(model)) for _ in range(2)]
    graphs = sides[1].graphs = Graphs(model, sides[1].state, KEYS, (), lambda line: None)
    pipe.send(("line", f"{len(KEYS)} steps with collectives captured"))
    for start, counts in STEPS:
        counts = counts if groups.dp.rank == 0 else counts[:1]
        eager, replayed = (
            _logits(model, side, start, counts, bucket) for side, bucket in zip(sides, (0, ROWS), strict=True)
        )
        _compare(eager, replayed, device)
        pipe.send(("line", f"a replay at position {start} is the eager step"))
    return graphs


def _compare(eager: torch.Tensor, replayed: torch.Tensor, device: torch.device) -> None:
    """raises AssertionError"""
    if device.type == "cpu":
        assert (eager - replayed).abs().max() <= CPU_APART * eager.abs().max()
    else:
        # Attention is cut by how many columns there are, padded ones too.
        assert torch.cosine_similarity(eager, replayed).min() > 0.95


def _model(groups: Groups, device: torch.device) -> DeepseekV4:
    config = ModelConfig.from_dict(
        {**FIELDS, "num_hidden_layers": 2, "compress_ratios": [4, 128], "num_hash_layers": 0}
    )
    rule, cpu = share_of(config, groups, split_head=False).rule, device.type == "cpu"
    dtype, ops = (torch.float32, CpuOps()) if cpu else (torch.bfloat16, _triton(device))
    weights = DummyWeights(
        config, dtype, device, seed=3, rule=rule, layout=FLOAT_LAYOUT if cpu else DEEPSEEK_LAYOUT
    )
    return DeepseekV4(
        config, weights, device=device, dtype=dtype, deterministic=False, kv_rounding="none", ops=ops,
        groups=groups,
    )  # fmt: skip


def _triton(device: torch.device) -> Any:
    from engine.kernels.triton_ops import TritonOps

    return TritonOps(device)


def _state(model: DeepseekV4) -> KVState:
    made = KVState(model.config, 3, 3, 3, model.device, model.dtype)
    for slot in (1, 2):
        made.bind(slot, 1)
    made.map_pages(np.array([[1, 0, 1, 2], [2, 0, 2, 1]], np.int32))
    return made


def _logits(
    model: DeepseekV4, side: TargetPath, start: int, counts: tuple[int, ...], bucket: int
) -> torch.Tensor:
    """Of every row of the step, which is committed."""

    def column(numbers: Any) -> bytes:
        return np.asarray(numbers, np.int32).tobytes()

    slots, rows = range(1, len(counts) + 1), sum(counts)
    peers = [(-1, ROWS, ROWS)] * RANKS
    peers[model.groups.dp.rank] = (-1, rows, rows)
    step = RunStep(
        1, "decode", column(slots), column([1] * len(counts)), column([start] * len(counts)), column(counts),
        column(range(9, 9 + rows)), b"\1" * len(counts), bucket=bucket, ranks=tuple(peers),
    )  # fmt: skip
    batch = build_batch(
        step, rank=model.groups.dp.rank, row_tile=1, idle_runs=True, every_logit=True, taps=(), graph_key="",
        tbo_boundary=-1, cp_segments=(),
    )  # fmt: skip
    plan = side.plan(batch, bucket)
    out = side.run(plan)
    logits = out.logits.clone()
    commit_step(model, side.state, plan, out.pending)
    model.ops.check()
    return logits
