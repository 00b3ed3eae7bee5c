"""A draft comes through DeepSeek's types whole, and a misfit with its target is refused with both values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError, ConfigError
from engine.kernels.cpu import CpuOps
from engine.model.checkpoint import load_checkpoint, open_checkpoint
from engine.model.config import ModelConfig
from engine.model.draft import Drafted, Drafter, DraftRows, InjectRows
from engine.model.draft_loading import load_drafter
from engine.model.dummy import dummy_weights
from engine.model.export import write_checkpoint
from engine.model.groups import ONE, Group, Groups
from engine.model.layout import DEEPSEEK_LAYOUT, FLOAT_LAYOUT, expected_tensors
from engine.model.model import DeepseekV4
from engine.model.share import share_of
from engine.model.tensor_specs import Draft
from tests.checkpoint.test_loading import as_stored, silent

CPU = torch.device("cpu")
LAST = "mtp.2."
KINDS = [(Draft.CLASSIC, 1), (Draft.DSPARK, 3)]


def target(config: ModelConfig, weights: dict[str, Tensor]) -> DeepseekV4:
    return DeepseekV4(
        config, weights, device=CPU, dtype=torch.float32, deterministic=True, kv_rounding="none",
        ops=CpuOps(),
    )  # fmt: skip


def drafted(drafter: Drafter, config: ModelConfig) -> Drafted:
    """A draft after 40 rows of noise."""
    generator, state = torch.Generator().manual_seed(5), drafter.new_state(2)
    taps = torch.randn(len(drafter.taps), 40, config.hidden_size, generator=generator)
    rows = InjectRows(torch.ones(40, dtype=torch.int64), torch.arange(40), torch.arange(40) + 2)
    drafter.inject(state, rows, taps)
    where = DraftRows(np.array([1]), np.array([40]), np.array([0]), torch.tensor([41]))
    return drafter.draft(state, where, keep_logits=True)


@pytest.fixture(scope="module")
def everything(dspark_fields: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of target and DSpark draft."""
    layout = replace(FLOAT_LAYOUT, draft=Draft.DSPARK, stages=3)
    return dummy_weights(ModelConfig.from_dict(dspark_fields), torch.float32, CPU, 7, layout=layout)


@pytest.fixture(scope="module")
def model(dspark_fields: dict[str, Any], everything: dict[str, Tensor]) -> DeepseekV4:
    """The target."""
    return target(ModelConfig.from_dict(dspark_fields), everything)


@pytest.mark.parametrize(("draft", "stages"), KINDS)
def test_a_draft_of_fp8_and_fp4_tensors_drafts_what_its_rounded_weights_say(
    tmp_path: Path, fields: dict[str, Any], dspark_fields: dict[str, Any], draft: Draft, stages: int
) -> None:
    own = dspark_fields if draft is Draft.DSPARK else fields
    config = ModelConfig.from_dict(own)
    made = dummy_weights(config, torch.float32, CPU, layout=replace(FLOAT_LAYOUT, draft=draft, stages=stages))
    write_checkpoint(tmp_path, own, made, quantised=True)
    loaded_config, loaded = load_checkpoint(tmp_path, torch.float32, CPU, draft=True, progress=silent)
    specs = expected_tensors(config, replace(DEEPSEEK_LAYOUT, draft=draft, stages=stages))
    rounded = {name: as_stored(name, specs[name].role, tensor) for name, tensor in made.items()}
    got = drafted(load_drafter(loaded_config, loaded, target(loaded_config, loaded)), config)
    want = drafted(load_drafter(config, rounded, target(config, rounded)), config)
    assert got.logits is not None
    assert want.logits is not None
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(got.survival, want.survival)
    assert got.ids.shape == (1, 5 if draft is Draft.DSPARK else 1)


def test_a_drafts_experts_are_on_every_rank(dspark_fields: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(dspark_fields)
    layout = replace(FLOAT_LAYOUT, draft=Draft.DSPARK, stages=3)
    share = share_of(config, Groups(ONE, Group(1, 4, None, None)), split_head=False)
    held = dummy_weights(config, torch.float32, CPU, rule=share.rule, layout=layout)
    whole = [name for name in expected_tensors(config, layout) if name.startswith("mtp.")]
    assert [name for name in held if name.startswith("mtp.")] == whole
    assert "layers.3.ffn.experts.2.w1.weight" in held
    assert "layers.3.ffn.experts.1.w1.weight" not in held


def test_experts_of_its_own_number_are_read_from_the_draft_fields(dspark_fields: dict[str, Any]) -> None:
    fields = dspark_fields | {"dspark_n_routed_experts": 3, "dspark_num_experts_per_tok": 2}
    config = ModelConfig.from_dict(fields)
    names = expected_tensors(config, replace(FLOAT_LAYOUT, draft=Draft.DSPARK, stages=3))
    assert "mtp.1.ffn.experts.2.w1.weight" in names
    assert "mtp.1.ffn.experts.3.w1.weight" not in names
    assert names["mtp.1.ffn.gate.weight"].shape == (3, 256)
    assert "layers.1.ffn.experts.7.w1.weight" in names


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (f"{LAST}markov_head.markov_w1.weight", None, "is missing"),
        (f"{LAST}markov_head.markov_w2.weight", None, "is missing"),
        (f"{LAST}confidence_head.proj.weight", None, "is missing"),
        (f"{LAST}norm.weight", None, "is missing"),
        ("mtp.1.attn.attn_sink", None, "is missing"),
        (f"{LAST}markov_head.markov_w1.weight", (384, 32), r"\(384, 32\), not \(384, 64\)"),
        (f"{LAST}markov_head.markov_w2.weight", (300, 64), r"\(300, 64\), not \(384, 64\)"),
        (f"{LAST}confidence_head.proj.weight", (1, 256), r"\(1, 256\), not \(1, 320\)"),
        ("mtp.0.main_proj.weight", (256, 512), r"\(256, 512\), not \(256, 768\)"),
        ("mtp.1.main_norm.weight", (256,), "is of no use"),
        ("mtp.0.ffn.experts.8.w1.weight", (256, 256), "is of no use"),
    ],
)
def test_a_tensor_that_is_missing_misshapen_or_unused_is_named(
    dspark_fields: dict[str, Any],
    everything: dict[str, Tensor],
    model: DeepseekV4,
    name: str,
    shape: tuple[int, ...] | None,
    message: str,
) -> None:
    weights = {key: value for key, value in everything.items() if key != name}
    if shape is not None:
        weights[name] = torch.zeros(shape)
    with pytest.raises(CheckpointError, match=f"{name}.*{message}"):
        load_drafter(model.config, weights, model)


def test_a_missing_tensor_of_the_draft_is_named_before_anything_is_loaded(
    tmp_path: Path, dspark_fields: dict[str, Any], everything: dict[str, Tensor]
) -> None:
    """Here the last stage is gone whole, so the second one would have to end the draft."""
    shallow = {name: tensor for name, tensor in everything.items() if not name.startswith(LAST)}
    with pytest.raises(CheckpointError, match=r"mtp\.1\.norm\.weight is missing"):
        write_checkpoint(tmp_path, dspark_fields, shallow, quantised=False)
    write_checkpoint(tmp_path, dspark_fields, everything, quantised=False)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"dspark_markov_rank": 64', '"dspark_markov_rank": 128')
    )
    with pytest.raises(
        CheckpointError, match=r"markov_w1.weight has shape \[384, 64\], expected \[384, 128\]"
    ):
        open_checkpoint(tmp_path, draft=True)
    open_checkpoint(tmp_path)


def test_a_checkpoint_without_a_draft_cant_speculate(
    fields: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    config = ModelConfig.from_dict(fields)
    with pytest.raises(CheckpointError, match=r"no mtp\.\* tensor"):
        load_drafter(config, weights, target(config, weights))


def test_a_target_that_holds_a_part_of_the_head_cant_lend_it(
    dspark_fields: dict[str, Any], everything: dict[str, Tensor]
) -> None:
    config = ModelConfig.from_dict(dspark_fields)
    half = everything | {"head.weight": everything["head.weight"][:192]}
    dp = Groups(Group(0, 2, None, None), ONE)
    model = DeepseekV4(
        config, half, device=CPU, dtype=torch.float32, deterministic=False, kv_rounding="none", groups=dp,
        split_head=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="384 rows on every rank, but this one holds 192"):
        load_drafter(config, half, model)


def test_compressed_draft_stages_are_refused(
    dspark_fields: dict[str, Any], everything: dict[str, Tensor]
) -> None:
    config = ModelConfig.from_dict(dspark_fields | {"compress_ratios": [0, 4, 128, 4, 0, 4, 0]})
    with pytest.raises(ConfigError, match=r"\[0, 4, 0\], not zeros"):
        load_drafter(config, everything, target(config, everything))


def test_several_classic_modules_are_refused(
    fields: dict[str, Any],
    weights: dict[str, Tensor],
    draft_weights: Callable[[dict[str, Any], Draft, int], dict[str, Tensor]],
) -> None:
    config = ModelConfig.from_dict(fields)
    both = weights | draft_weights(fields, Draft.CLASSIC, 2)
    with pytest.raises(CheckpointError, match="2 classic modules"):
        load_drafter(config, both, target(config, weights))


def test_embedding_and_head_are_the_targets_own(model: DeepseekV4, everything: dict[str, Tensor]) -> None:
    drafter = load_drafter(model.config, everything, model)
    assert drafter.head.head is model.head.head
    assert drafter.model is model
    assert (drafter.block, drafter.taps) == (5, (1, 2, 3))
