"""Adds a trained draft to the target's checkpoint: one more shard, and the draft's entries in config.json.

    python -m training.draft_export --draft R/draft.pt --evaluation R/draft-evaluation.json

The target's shards are not written again: their bytes stay as they are, under names with the new count.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.model.checkpoint import load_checkpoint
from engine.model.export import write_checkpoint
from engine.model.sources import INDEX_NAME
from training.draft_model import Draft, DraftShape
from training.geometry import Geometry
from training.naming import checkpoint_name

_LAST = {
    "mix.fn": "hc_head_fn",
    "mix.base": "hc_head_base",
    "mix.scale": "hc_head_scale",
    "norm.weight": "norm.weight",
    "markov_embed.weight": "markov_head.markov_w1.weight",
    "markov_head.weight": "markov_head.markov_w2.weight",
    "confidence_head.weight": "confidence_head.proj.weight",
}


class TargetChanged(Exception):
    """The stored target differs from what its own weights give when they are written."""


def draft_name(name: str, stages: int) -> str:
    """DeepSeek's name of a tensor of the draft; a stack of experts gets `{}` for the expert's number."""
    if name.startswith("stages."):
        return checkpoint_name("layers." + name.removeprefix("stages.")).replace("layers.", "mtp.", 1)
    if name in _LAST:
        return f"mtp.{stages - 1}.{_LAST[name]}"
    return f"mtp.0.{name}"


def draft_tensors(draft: Draft) -> dict[str, Tensor]:
    """Every tensor under DeepSeek's names, float32 on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in draft.state_dict().items():
        target, values = draft_name(name, draft.shape.stages), tensor.detach().float().cpu()
        if name.endswith(".fn"):
            # The products were trained with these rounded to bf16; the file's type is float32.
            values = values.to(torch.bfloat16).float()
        if "{}" in target:
            tensors.update({target.format(i): expert for i, expert in enumerate(values)})
        else:
            tensors[target] = values
    return tensors


def draft_from_checkpoint(draft: Draft, tensors: dict[str, Tensor]) -> None:
    """Copies the `mtp.*` tensors of a checkpoint into the draft. raises KeyError for a missing one."""
    with torch.no_grad():
        for name, tensor in draft.state_dict().items():
            target = draft_name(name, draft.shape.stages)
            if "{}" in target:
                tensor.copy_(torch.stack([tensors[target.format(i)] for i in range(tensor.shape[0])]))
            else:
                tensor.copy_(tensors[target])


def export(draft: Draft, temperatures: list[float], folder: Path) -> None:
    """Adds the draft to the checkpoint in `folder`, in place of an older one.

    raises  TargetChanged
    """
    fields = json.loads((folder / "config.json").read_text())
    fields |= {**draft.shape.fields(), "dspark_sts_temperatures": temperatures}
    _, target = load_checkpoint(folder, torch.float32, torch.device("cpu"), progress=lambda *_: None)
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name)
        write_checkpoint(whole, fields, target | draft_tensors(draft), quantised=True)
        stored = read_tensors(whole)
    held = {name: tensor for name, tensor in read_tensors(folder).items() if not name.startswith("mtp.")}
    for name, tensor in held.items():
        if not torch.equal(tensor.view(torch.uint8), stored[name].view(torch.uint8)):
            raise TargetChanged(name)
    _write(folder, {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}, fields)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every stored tensor, as it lies in the shards."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        with safe_open(file, "pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return tensors


def _write(folder: Path, draft: dict[str, Tensor], fields: dict[str, Any]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    places = {name: file for name, file in index["weight_map"].items() if not name.startswith("mtp.")}
    for file in set(index["weight_map"].values()) - set(places.values()):
        (folder / file).unlink()
    old = sorted(set(places.values()))
    count = len(old) + 1
    new = {file: f"model-{number:05d}-of-{count:05d}.safetensors" for number, file in enumerate(old, 1)}
    for file, name in new.items():
        (folder / file).rename(folder / name)
    last = f"model-{count:05d}-of-{count:05d}.safetensors"
    save_file(draft, folder / last)
    weight_map = {name: new[file] for name, file in places.items()} | dict.fromkeys(draft, last)
    index["weight_map"] = dict(sorted(weight_map.items()))
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", type=Path, required=True, help="draft.pt of training.draft_train")
    parser.add_argument("--evaluation", type=Path, required=True, help="what training.draft_gates wrote")
    parser.add_argument("--model", type=Path, default=Path("engine/assets/nano"), help="target's folder")
    args = parser.parse_args()
    draft = Draft(Geometry(), DraftShape())
    draft.load_state_dict(torch.load(args.draft, map_location="cpu"))
    temperatures = json.loads(args.evaluation.read_text())["confidence"]["temperatures"]
    export(draft, temperatures, args.model)
    for path in sorted(args.model.glob("*.safetensors")):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
