"""Each kind of damage is refused before anything is loaded, with an error that names the tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.checkpoint import load_checkpoint, open_checkpoint
from engine.model.sources import INDEX_NAME

WQ_A = "layers.1.attn.wq_a.weight"
W2 = "layers.1.ffn.experts.3.w2.weight"


@pytest.fixture
def folder(tmp_path: Path, quantised_folder: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(quantised_folder, tmp_path / "copy"))


def edit(folder: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite the shard that holds `name`, and place what it now holds in the index."""
    index = json.loads((folder / INDEX_NAME).read_text())
    file = index["weight_map"][name]
    tensors = load_file(folder / file)
    change(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / file)
    rest = {key: place for key, place in index["weight_map"].items() if place != file}
    index["weight_map"] = rest | dict.fromkeys(tensors, file)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def refused(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(folder)


def test_a_missing_tensor_is_named_with_its_expected_shape(folder: Path) -> None:
    edit(folder, WQ_A, lambda tensors: tensors.__delitem__(WQ_A))
    refused(folder, rf"{WQ_A} is missing \(expected F8_E4M3 \[128, 256\]\)")


def test_an_extra_tensor_is_named_with_its_file(folder: Path) -> None:
    edit(folder, WQ_A, lambda tensors: tensors.update({"layers.9.attn.wq_a.weight": torch.zeros(1)}))
    refused(folder, r"layers\.9\.attn\.wq_a\.weight is extra \(model-.*safetensors\)")


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    edit(folder, WQ_A, lambda tensors: tensors.update({WQ_A: tensors[WQ_A].view(256, 128)}))
    refused(folder, rf"{WQ_A} has shape \[256, 128\], expected \[128, 256\]")


@pytest.mark.parametrize("name", [WQ_A, W2])
def test_a_tensor_of_a_wrong_type_is_named_with_both_types(folder: Path, name: str) -> None:
    edit(folder, name, lambda tensors: tensors.update({name: torch.zeros(tensors[name].shape)}))
    refused(folder, rf"{name} is F32, expected (F8_E4M3|I8/U8)")


def test_float32_scales_are_refused_rather_than_misread(folder: Path) -> None:
    scale = WQ_A.replace("weight", "scale")
    edit(folder, scale, lambda tensors: tensors.update({scale: torch.full((1, 2), 120.0)}))
    refused(folder, rf"{scale} is F32, expected F8_E8M0/U8")


def test_all_problems_are_counted_and_the_first_are_listed(folder: Path) -> None:
    def replace_all(tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        tensors["x"] = torch.zeros(1)

    edit(folder, WQ_A, replace_all)
    refused(folder, "and [0-9]+ more")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_an_unreadable_index_is_an_error_not_a_fallback(folder: Path, content: str) -> None:
    (folder / INDEX_NAME).write_text(content)
    refused(folder, INDEX_NAME)


def test_an_index_that_disagrees_with_a_shard_is_refused(folder: Path) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    places = sorted(set(index["weight_map"].values()))
    index["weight_map"][WQ_A] = next(place for place in places if place != index["weight_map"][WQ_A])
    (folder / INDEX_NAME).write_text(json.dumps(index))
    refused(folder, WQ_A)


def test_a_shard_that_isnt_there_is_named(folder: Path) -> None:
    file = json.loads((folder / INDEX_NAME).read_text())["weight_map"][WQ_A]
    (folder / file).unlink()
    refused(folder, file)


@pytest.mark.parametrize("keep", [3, 100, -10])
def test_a_truncated_shard_is_refused(folder: Path, keep: int) -> None:
    file = folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][WQ_A]
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, file.name)


def test_a_folder_without_weights_says_what_it_lacks(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    refused(folder, "has neither model.safetensors.index.json nor model.safetensors")


def test_nan_scales_codes_and_values_are_refused_by_name(folder: Path) -> None:
    scale = W2.replace("weight", "scale")

    def nan_scale(tensors: dict[str, Tensor]) -> None:
        tensors[scale].view(torch.uint8)[3, 2] = 255

    edit(folder, scale, nan_scale)
    with pytest.raises(CheckpointError, match=rf"{W2}: 1 of .* e8m0 scales are NaN"):
        load_checkpoint(folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("expert", [-1, 8])
def test_a_hash_table_with_an_unknown_expert_is_refused(folder: Path, expert: int) -> None:
    name = "layers.0.ffn.gate.tid2eid"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][5, 1] = expert

    edit(folder, name, change)
    with pytest.raises(CheckpointError, match=rf"{name}: holds experts"):
        load_checkpoint(folder, torch.float32, torch.device("cpu"))


def test_a_nan_value_is_refused_by_name(folder: Path) -> None:
    name = "layers.2.attn.compressor.ape"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][5, 1] = float("nan")

    edit(folder, name, change)
    with pytest.raises(CheckpointError, match=rf"{name}: 1 of .* values are NaN or infinite"):
        load_checkpoint(folder, torch.float32, torch.device("cpu"))


def test_dspark_stages_without_their_configuration_are_refused(folder: Path) -> None:
    edit(folder, WQ_A, lambda tensors: tensors.update({"mtp.0.main_proj.weight": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match="no dspark_"):
        open_checkpoint(folder, draft=True)
