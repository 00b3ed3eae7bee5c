"""The draft as it is trained and as it is served are one function, and an export keeps the target's bytes."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import NANO
from engine.model.checkpoint import load_checkpoint
from engine.model.draft import DraftRows, InjectRows
from engine.model.draft_loading import load_drafter
from engine.model.model import DeepseekV4
from training.draft_data import packed
from training.draft_decode import Prompts, generate, new_decoder
from training.draft_export import draft_from_checkpoint, export, read_tensors
from training.draft_generate import load_target
from training.draft_model import Blocks, Draft, DraftShape, initialise_draft, observe
from training.geometry import Geometry
from training.model import Model, initialise

LENGTH = 256
# By chunk of 128 positions.
ANCHORS = torch.tensor([[[1, 2, 5, 127], [128, 129, 200, 250]]])
CPU = torch.device("cpu")
SMALL = replace(
    Geometry(),
    vocab_size=512,
    hidden_size=128,
    head_dim=128,
    q_lora_rank=64,
    o_lora_rank=64,
    expert_width=64,
    compress_ratios=(0, 4, 128, 4),
    num_hash_layers=1,
    index_topk=16,
)


@pytest.fixture(scope="module")
def target() -> Model:
    """The shipped model in float32."""
    return load_target(Path(NANO), CPU)


@pytest.fixture(scope="module")
def folder(target: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped checkpoint with a draft of random weights, in which nothing is trivial."""
    folder = tmp_path_factory.mktemp("nano")
    shutil.copytree(NANO, folder, dirs_exist_ok=True)
    draft = Draft(Geometry(), DraftShape())
    initialise_draft(draft, target, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.startswith(("markov_head", "confidence_head")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif parameter.ndim < 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        for stage in draft.blocks():
            stage.ffn.gate.bias.copy_(torch.randn(8, generator=generator) * 0.2)
    export(draft, [0.5, 1.0, 1.5, 2.0, 2.5], folder)
    return folder


def as_trained(folder: Path) -> Draft:
    """The training model with a checkpoint's draft."""
    draft = Draft(Geometry(), DraftShape()).requires_grad_(False)
    _, weights = load_checkpoint(folder, torch.float32, CPU, draft=True, progress=lambda *_: None)
    draft_from_checkpoint(draft, weights)
    return draft


@pytest.mark.parametrize("place", ["random", "shipped"])
@torch.no_grad()
def test_training_and_serving_draft_the_same(place: str, folder: Path, target: Model) -> None:
    """At every kind of length; logits and confidences within 1e-4 in float32."""
    source = folder if place == "random" else Path(NANO)
    config, weights = load_checkpoint(source, torch.float32, CPU, draft=True, progress=lambda *_: None)
    model = DeepseekV4(
        config, weights, device="cpu", dtype=torch.float32, deterministic=False, kv_rounding="none"
    )
    drafter, draft = load_drafter(config, weights, model), as_trained(source)
    ids = torch.randint(3, 8178, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    taps, _ = observe(target, ids, draft.shape.taps)
    hidden, _ = draft(ids, target.embed.weight, taps, Blocks(ANCHORS, torch.zeros_like(ANCHORS)))
    hidden = hidden.view(ANCHORS.numel(), draft.shape.block, -1)
    apart = taps.view(LENGTH, len(draft.shape.taps), -1).transpose(0, 1)
    state = drafter.new_state(2)
    assert config.dspark is not None
    temperatures = torch.tensor(config.dspark.sts_temperatures)
    done = 0
    for anchor, own in zip(ANCHORS.flatten().tolist(), hidden, strict=True):
        rows = torch.arange(max(done, anchor - 128), anchor)
        drafter.inject(state, InjectRows(torch.ones_like(rows), rows), apart[:, rows])
        done = anchor
        place_of = DraftRows(np.array([1]), np.array([anchor]), np.array([0]), ids[0, anchor : anchor + 1])
        served = drafter.draft(state, place_of, keep_logits=True)
        assert served.logits is not None
        tokens = served.ids[0].tolist()
        previous = torch.tensor([int(ids[0, anchor]), *tokens[:-1]])
        logits = draft.logits(own, previous, target.head.weight)
        torch.testing.assert_close(served.logits[0], logits, atol=1e-4, rtol=1e-4)
        assert tokens == logits.argmax(-1).tolist()
        estimate = torch.sigmoid(draft.confidence(own, previous) / temperatures).cumprod(0)
        torch.testing.assert_close(served.survival[0], estimate, atol=1e-4, rtol=1e-4)


def test_a_block_sees_itself_both_ways_and_nothing_from_its_anchor_on(folder: Path, target: Model) -> None:
    draft = as_trained(folder)
    anchor, block = 200, draft.shape.block
    ids = torch.randint(3, 8178, (1, LENGTH), generator=torch.Generator().manual_seed(6))
    taps, _ = observe(target, ids, draft.shape.taps)

    def hidden(taps: Tensor, ids: Tensor, start: int = 0) -> Tensor:
        places = torch.arange(0, LENGTH, 128).view(1, -1, 1).clone()
        places[0, 1, 0] = anchor
        with torch.no_grad():
            rows, _ = draft(ids, target.embed.weight, taps, Blocks(places, torch.full_like(places, start)))
        return rows.view(-1, block, rows.shape[-1])[1]

    plain = hidden(taps, ids)
    for outside in (anchor - 129, anchor, anchor + 3):
        changed = taps.clone()
        changed[0, outside] += 1.0
        assert torch.equal(hidden(changed, ids), plain)
    for inside in (anchor - 128, anchor - 1):
        changed = taps.clone()
        changed[0, inside] += 1.0
        assert (hidden(changed, ids) != plain).any(-1).all()
        assert (hidden(changed, ids, inside + 1) == hidden(taps, ids, inside + 1)).all()
    other = ids.clone()
    other[0, anchor] = 7
    assert (hidden(taps, other) != plain).any(-1).all()


def test_an_export_adds_to_the_checkpoint_and_changes_no_target_tensor(folder: Path) -> None:
    shipped, made = read_tensors(Path(NANO)), read_tensors(folder)
    target = {name for name in shipped if not name.startswith("mtp.")}
    assert target == {name for name in made if not name.startswith("mtp.")}
    for name in target:
        assert torch.equal(shipped[name].view(torch.uint8), made[name].view(torch.uint8)), name
    assert len(target) < len(made)


def test_the_generator_decodes_what_the_model_computes_for_whole_rows() -> None:
    """Rows at different positions, over windows and compressed entries; tolerance 1e-4."""
    model = Model(SMALL).requires_grad_(False)
    initialise(model, 3)
    ids = torch.randint(3, SMALL.vocab_size, (2, 256), generator=torch.Generator().manual_seed(7))
    wanted = model.logits(ids, "dense")
    decoder = new_decoder(model, 2, 256, 1)
    decoder.rows.ids.copy_(ids)
    decoder.rows.prompt.fill_(256)
    decoder.rows.done.copy_(torch.tensor([False, True]))
    for step in range(250):
        if step == 3:
            decoder.rows.done.fill_(False)
        at = decoder.rows.position.clone()
        logits = decoder.logits()
        torch.testing.assert_close(logits, wanted[torch.arange(2), at], atol=1e-4, rtol=1e-4)
        decoder.rows.position += (~decoder.rows.done).long()


def test_generation_answers_each_prompt_once_and_greedily_as_whole_rows_do() -> None:
    model = Model(SMALL).requires_grad_(False)
    initialise(model, 4)
    random = np.random.default_rng(1)
    lengths = torch.tensor([3, 9, 1, 6, 2])
    ids = torch.from_numpy(random.integers(3, SMALL.vocab_size, (5, 9)).astype(np.int16))
    prompts = Prompts(ids, lengths, torch.tensor([0.0, 0.0, 1.0, 0.0, 0.7]), torch.arange(5))
    parts = list(generate(new_decoder(model, 2, 24, 1), prompts, steps_per_look=4))
    kinds = torch.cat([part.kinds for part in parts]).tolist()
    assert sorted(kinds) == [0, 1, 2, 3, 4]
    rows = packed(parts, 2, 64, alone=False)
    assert sorted(rows["texts"][:, 5].tolist()) == [0, 1, 2, 3, 4]
    for row, start, answer, stop, heat, kind in rows["texts"].tolist():
        text = torch.from_numpy(rows["ids"][row, start:stop]).long()
        assert text[: answer - start].tolist() == ids[kind, : lengths[kind]].tolist()
        assert stop - start == 24 or text[-1] == 1
        if heat == 0:
            whole = torch.cat((text, torch.zeros(128 - len(text), dtype=torch.int64)))[None]
            best = model.logits(whole, "dense")[0].argmax(-1)
            assert text[answer - start :].tolist() == best[answer - start - 1 : stop - start - 1].tolist()
