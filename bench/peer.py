"""transformers' eager DeepSeek-V4 on the same weights, in its own process: the peer of `bench offline`."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Batch = list[list[int]]


class Peer:
    """A process that generates greedily in eager batches. One order at a time; idle between orders.

    device, dtype  where its weights are, and what of, as torch names them
    """

    def __init__(self, model_path: str, threads: int, device: str = "cpu", dtype: str = "float32") -> None:
        self._end, far = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        told = (far, model_path, threads, device, dtype)
        self._process = context.Process(target=_serve, args=told, daemon=True)
        self._process.start()
        far.close()
        self._end.recv()

    def run(self, batches: Sequence[Batch], new_tokens: int) -> tuple[float, list[list[int]]]:
        """(seconds, new tokens of each prompt in order); a batch's prompts have one length."""
        self._end.send((list(batches), new_tokens))
        seconds, outputs = self._end.recv()
        return float(seconds), outputs

    def close(self) -> None:
        """Ends the process."""
        self._end.send(None)
        self._process.join()


def _serve(end: Connection, model_path: str, threads: int, device: str, dtype: str) -> None:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    import torch

    torch.set_num_threads(threads)
    model = load(model_path).to(device, getattr(torch, dtype))
    end.send("ready")
    while (order := end.recv()) is not None:
        batches, new_tokens = order
        begin = time.perf_counter()
        outputs = [row for batch in batches for row in _generate(model, batch, new_tokens)]
        end.send((time.perf_counter() - begin, outputs))


def _generate(model: Any, batch: Batch, new_tokens: int) -> list[list[int]]:
    import torch

    ids = torch.tensor(batch, device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[:, ids.shape[1] :].tolist()


def load(model_path: str) -> Any:
    """DeepseekV4ForCausalLM in float32 with the checkpoint's dequantised weights."""
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    from engine.model.checkpoint import load_checkpoint

    fields = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    scaling = {**fields.pop("rope_scaling")}
    fields.pop("quantization_config", None)
    rope = {"rope_type": scaling.pop("type"), **scaling}
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**fields, rope_parameters=rope)).eval()
    _, weights = load_checkpoint(model_path, torch.float32, torch.device("cpu"), progress=lambda *_: None)
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weight_for(name, weights))
    return model


def weight_for(name: str, weights: Mapping[str, Any]) -> Any:
    """The tensor of transformers' name `name` from weights under DeepSeek's names."""
    import torch

    from engine.model.names import deepseek_name

    plain = deepseek_name(name)
    if plain is not None:
        return weights[plain]
    match = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)", name)
    if match is None:
        raise KeyError(name)
    prefix = f"layers.{match[1]}.ffn.experts"
    count = sum(1 for key in weights if key.startswith(f"{prefix}.") and key.endswith(".w2.weight"))
    if match[2] == "down_proj":
        return torch.stack([weights[f"{prefix}.{e}.w2.weight"] for e in range(count)])
    pairs = [[weights[f"{prefix}.{e}.{w}.weight"] for w in ("w1", "w3")] for e in range(count)]
    return torch.stack([torch.cat(pair) for pair in pairs])
