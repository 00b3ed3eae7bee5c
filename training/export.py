"""Writes a trained state as a checkpoint in DeepSeek's own layout.

    python -m training.export --state RUN/state.pt --out engine/assets/nano

FP8 dense weights with 128x128 ue8m0 scales, packed FP4 experts with group-32 scales, I64 hash tables, bf16
and f32 for the rest; safetensors shards under 16 MiB with an index, and config.json. The tokenizer files lie
there already.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.model.export import write_checkpoint
from training.corpus import known_id, load_tokenizer
from training.geometry import Geometry, config_json
from training.model import Model, use_bf16
from training.naming import to_checkpoint
from training.optimizer import Optimizer
from training.tokenizer import BOS, EOS


def load_model(state_file: Path, device: torch.device, quantise: bool) -> Model:
    """The trained model with bf16 matrices; with `quantise`, as its checkpoint can hold them."""
    state: dict[str, Any] = torch.load(state_file, map_location=device)
    model = use_bf16(Model(Geometry()).to(device))
    Optimizer(model).load(state["optimizer"], quantise)
    buffers = dict(model.named_buffers())
    for name, tensor in state["buffers"].items():
        buffers[name].copy_(tensor)
    for parameter in model.parameters():
        parameter.grad = None
    return model.requires_grad_(False)


def weights(model: Model) -> dict[str, Tensor]:
    """Every tensor under DeepSeek's names, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in to_checkpoint(model).items():
        tensor = tensor.detach().cpu()
        if name.endswith("_fn"):
            # The products were trained with these rounded to bf16; the file's type is float32.
            tensor = tensor.to(torch.bfloat16).float()
        tensors[name] = tensor
    return tensors


def export(model: Model, tokenizer_folder: Path, out: Path) -> None:
    """Writes shards, index and config.json; older shards are removed."""
    tokenizer = load_tokenizer(tokenizer_folder)
    ids = [known_id(tokenizer, text) for text in (BOS, EOS)]
    for old in out.glob("model-*.safetensors"):
        old.unlink()
    write_checkpoint(out, config_json(model.geometry, *ids), weights(model), quantised=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, required=True, help="state.pt of training.train")
    parser.add_argument("--tokenizer", type=Path, default=Path("engine/assets/nano"), help="model folder")
    parser.add_argument("--out", type=Path, default=Path("engine/assets/nano"), help="folder to write to")
    args = parser.parse_args()
    model = load_model(args.state, torch.device("cpu"), quantise=True)
    export(model, args.tokenizer, args.out)
    for path in sorted(args.out.glob("*.safetensors")):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
