"""What a training run begins with: its device, its initial model, and the held-out rows it watches."""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from training.batches import ROW
from training.experts import hash_table
from training.geometry import Geometry
from training.model import Model, initialise

# Their held-out part overlaps the training text.
LEFT_OUT = ("json-octokit", "json-mdn-compat", "json-discovery")


def pick_device(local_rank: int, world: int) -> torch.device:
    """This rank's GPU, or the CPU where there is none; joins the other ranks where there are several."""
    if not torch.cuda.is_available():
        if world > 1:
            dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def new_model(geometry: Geometry, tokens: np.ndarray, seed: int) -> Model:
    """An initialised model whose hash tables balance the experts over these ids; on the CPU, float32."""
    model = Model(geometry)
    initialise(model, seed)
    counts = np.bincount(tokens, minlength=geometry.vocab_size).tolist()
    for index in range(geometry.num_hash_layers):
        table = hash_table(counts, geometry.num_experts, geometry.experts_per_token, seed + index)
        model.blocks()[index].ffn.gate.tid2eid.copy_(table)
    return model


def heldout_rows(file: Path, rows: int) -> Tensor:
    """Rows [rows, ROW + 1] int64, spread evenly over the sources' joined streams."""
    with np.load(file) as streams:
        joined = np.concatenate([streams[name] for name in sorted(streams) if name not in LEFT_OUT])
    starts = np.linspace(0, len(joined) - ROW - 1, rows).astype(np.int64)
    return torch.from_numpy(np.stack([joined[s : s + ROW + 1] for s in starts])).long()
