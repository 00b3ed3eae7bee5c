"""A quantised checkpoint computes what transformers does with weights that are decoded byte by byte here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from engine.memory.pools import KVState
from engine.messages import Sampling
from engine.model.checkpoint import load_checkpoint
from engine.model.export import write_checkpoint
from engine.model.model import DeepseekV4
from engine.model.names import from_transformers
from engine.runner.step import StepRunner
from tests.runner.driver import Driver

CPU = torch.device("cpu")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3_table() -> np.ndarray:
    """Value of each e4m3fn byte, from sign, exponent and mantissa."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(byte & 128, -magnitude, magnitude).astype(np.float32)


def decode_folder(folder: Path) -> dict[str, Tensor]:
    """Float32 weights from the raw bytes of every shard, with numpy alone."""
    raw: dict[str, tuple[np.ndarray, tuple[int, ...], str]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                tensor = shard.get_tensor(name)
                flat = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
                raw[name] = flat, tuple(tensor.shape), shard.get_slice(name).get_dtype()
    out: dict[str, Tensor] = {}
    for name, (data, shape, dtype) in raw.items():
        scale_name = name.removesuffix("weight") + "scale"
        if scale_name in raw and name.endswith(".weight"):
            exponents = raw[scale_name][0].reshape(raw[scale_name][1]).astype(np.int32) - 127
            if dtype == "F8_E4M3":
                values = e4m3_table()[data].reshape(shape)
                factor = np.kron(exponents, np.ones((128, 128), np.int32))[: shape[0], : shape[1]]
            else:
                packed = data.reshape(shape)
                values = np.empty((shape[0], 2 * shape[1]), np.float32)
                values[:, 0::2], values[:, 1::2] = E2M1[packed & 15], E2M1[packed >> 4]
                factor = np.repeat(exponents, 32, axis=1)
            out[name] = torch.from_numpy(np.ldexp(values, factor).astype(np.float32))
        elif dtype == "BF16":
            widened = data.view(np.uint16).astype(np.uint32) << 16
            out[name] = torch.from_numpy(widened.view(np.float32).reshape(shape).copy())
        elif dtype == "F32":
            out[name] = torch.from_numpy(data.view(np.float32).reshape(shape).copy())
        elif dtype == "I64":
            out[name] = torch.from_numpy(data.view(np.int64).reshape(shape).copy())
    return out


def transformers_model(fields: dict[str, Any]) -> Any:
    """transformers' model of the geometry, parameters not set."""
    transformers = pytest.importorskip("transformers")
    own = {
        key: value
        for key, value in fields.items()
        if key not in ("model_type", "architectures", "rope_scaling")
    }
    scaling = {key: value for key, value in fields["rope_scaling"].items() if key != "type"}
    config = transformers.DeepseekV4Config(**own, rope_parameters={"rope_type": "yarn", **scaling})
    return transformers.DeepseekV4ForCausalLM(config).eval()


def test_quantised_weights_compute_what_their_bytes_say(
    tmp_path: Path, fields: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    own = fields | {"index_n_heads": 32, "vocab_size": 384}
    enough_heads = {
        name: tensor
        if "indexer.wq_b" not in name and "weights_proj" not in name
        else tensor.repeat(4, 1) + torch.randn(4 * len(tensor), tensor.shape[1]) * 0.05
        for name, tensor in weights.items()
    }
    write_checkpoint(tmp_path, own, enough_heads, quantised=True, max_shard_bytes=4 << 20)
    peer = transformers_model(own)
    decoded = decode_folder(tmp_path)
    with torch.no_grad():
        for name, place in from_transformers(peer.state_dict()).items():
            place.copy_(decoded[name])
    config, loaded = load_checkpoint(tmp_path, torch.float32, CPU, progress=lambda *_: None)
    model = DeepseekV4(
        config, loaded, device="cpu", dtype=torch.float32, deterministic=False, kv_rounding="none"
    )
    driver = Driver(StepRunner(model, KVState(config, 3, 4, 4, CPU, torch.float32), (1,)))
    tokens = torch.randint(2, 384, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    request = driver.request(1, tokens, Sampling(1, temperature=0.0, prompt_logprobs=0, logprobs=0))
    scored: list[float] = []
    for count in (97, 53):
        columns = driver.step((request, count)).logprobs
        assert columns is not None
        scored += np.frombuffer(columns.prompt_chosen, np.float32).tolist()
    with torch.no_grad():
        reference = peer(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = reference[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert len(scored) == 149
    assert torch.tensor(scored).sub(expected).abs().max() < 1e-4
    assert request.output == [int(reference[-1].argmax())]
