"""Whole rounds with DSpark drafts whose tokens are chosen by kernels: the texts are those of plain torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.config import NANO
from engine.kernel_sets import choices
from engine.kernels.cpu import CpuOps
from engine.kernels.triton_ops import TritonOps
from engine.memory.pools import KVState
from engine.messages import Sampling, SlotBind, StepDone
from engine.model.config import ModelConfig
from engine.model.draft import BlockChoose, Choose
from engine.model.draft_loading import load_drafter
from engine.model.dummy import DummyWeights
from engine.model.layout import DEEPSEEK_LAYOUT, FLOAT_LAYOUT
from engine.model.model import DeepseekV4
from engine.model.ops import TorchOps
from engine.model.tensor_specs import Draft, Layout
from engine.runner.acceptance import Accepted
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.choices import PlainChoices
from engine.runner.device_choices import DeviceChoices
from engine.runner.edits import MaskWords
from engine.runner.parameters import SlotParameters
from engine.runner.sampling import Chosen, Rows
from engine.runner.speculative import Speculation
from engine.runner.step import StepRunner
from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.check_ops import FIELDS
from tests.runner.spec_driver import SpecDriver, Stream, prompt

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2, "compress_ratios": [4, 128, 0], "num_hash_layers": 0,
    "num_nextn_predict_layers": 1, "dspark_block_size": 2, "dspark_noise_token_id": 199,
    "dspark_target_layer_ids": [0, 1], "dspark_markov_rank": 16, "dspark_sts_temperatures": [1.0, 1.0],
}  # fmt: skip


def texts(
    model: DeepseekV4, weights: Any, sets: TorchOps, asked: list[tuple[list[int], Sampling]], tokens: int
) -> tuple[list[Stream], list[StepDone], StepRunner]:
    """What requests side by side get, with drafts; tokens are chosen as beside the operations `sets`."""
    config, device, dtype = model.config, torch.device(DEVICE), model.dtype
    state = KVState(config, 5, 6, 6, device, dtype)
    speculation = Speculation(load_drafter(config, weights, model), state, "compact")
    runner = StepRunner(
        model, state, (1,), speculation, choices=choices(sets, 5, config.vocab_size, (1,), device)
    )
    driver = SpecDriver(runner)
    streams = [
        driver.stream(slot, ids, sampling, len(ids) + tokens) for slot, (ids, sampling) in enumerate(asked, 1)
    ]
    done = [driver.round(*((stream, len(stream.prompt)) for stream in streams))]
    while left := [(stream, driver.width) for stream in streams if not stream.ended]:
        done.append(driver.round(*left))
    return streams, done, runner


def dummy(
    config: ModelConfig, ops: TorchOps, dtype: torch.dtype, layout: Layout
) -> tuple[DeepseekV4, DummyWeights]:
    """A random model, and the weights of one draft stage."""
    layout = replace(layout, draft=Draft.DSPARK, stages=1)
    weights = DummyWeights(config, dtype, torch.device(DEVICE), seed=3, layout=layout)
    model = DeepseekV4(
        config, weights, device=DEVICE, dtype=dtype, deterministic=False, kv_rounding="none", ops=ops
    )
    return model, weights


def prompt_of(length: int, seed: int) -> list[int]:
    """Random tokens below 200."""
    return [token % 198 + 2 for token in prompt(length, seed)]


def test_requests_of_every_kind_get_the_texts_of_plain_torch() -> None:
    """The shipped model's geometry on the C kernels: both ways see the same target logits."""
    fields = json.loads((NANO / "config.json").read_text()) | SMALL | {"vocab_size": 200}
    ops = CpuOps() if DEVICE == "cpu" else TorchOps()
    model, weights = dummy(ModelConfig.from_dict(fields), ops, torch.float32, FLOAT_LAYOUT)
    asked = [
        (prompt_of(9, 1), Sampling(20, temperature=0.0, frequency_penalty=0.8, logprobs=2)),
        (prompt_of(5, 2), Sampling(20, seed=5, temperature=2.0)),
        (prompt_of(7, 3), Sampling(20, seed=6, seeded=True, top_k=9, logit_bias=((30, 2.0),), logprobs=1)),
    ]
    plain, plain_done, _ = texts(model, weights, TorchOps(), asked, 4)
    kernels, done, runner = texts(model, weights, TritonOps(torch.device(DEVICE)), asked, 4)
    assert isinstance(runner.choices, DeviceChoices)
    assert [stream.output for stream in kernels] == [stream.output for stream in plain]
    assert [one.counts for one in done] == [one.counts for one in plain_done]
    assert any(count > 1 for one in done for count in one.counts), "a draft is accepted"
    for own, wanted in zip(done, plain_done, strict=True):
        assert own.logprobs is not None
        assert wanted.logprobs is not None
        assert own.logprobs.top_ids == wanted.logprobs.top_ids


class BothWays(PlainChoices):
    """Chooses by kernels, and notes where plain torch chooses otherwise from the same logits.

    A step answers an error with one request after the other, so nothing is raised here.
    """

    def __init__(self, kernels: DeviceChoices, slots: int, eos_ids: tuple[int, ...]) -> None:
        own = kernels.parameters
        super().__init__(SlotParameters(slots, own.vocab_size, eos_ids, own.floats.device))
        self.kernels = kernels
        self.equal: list[tuple[str, bool]] = []

    def bind(self, bind: SlotBind) -> None:
        super().bind(bind)
        self.kernels.bind(bind)

    def sample(self, logits: Tensor, rows: Rows, mask: MaskWords | None = None) -> Chosen:
        wanted, found = super().sample(logits, rows, mask), self.kernels.sample(logits, rows, mask)
        self.equal.append(("sample", found.tokens.tolist() == wanted.tokens.tolist()))
        return found

    def accept(self, logits: Tensor, rows: VerifyRows, mask: MaskWords | None = None) -> Accepted:
        wanted, found = super().accept(logits, rows, mask), self.kernels.accept(logits, rows, mask)
        self.equal.append(("accept", found.tokens.tolist() == wanted.tokens.tolist()))
        self.equal.append(("statistics", (rows.draft_stats is None) == (rows.draft_logits is None)))
        return found

    def choose(self, slots: Sequence[int], positions: Sequence[int]) -> Choose:
        plain, kernels = super().choose(slots, positions), self.kernels.choose(slots, positions)
        assert isinstance(kernels, BlockChoose)
        both = self

        class Block:
            def __call__(self, k: int, z: Tensor) -> Tensor:
                raise AssertionError("nothing guides these drafts")

            def block(self, logits: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> Any:
                ids, stats = kernels.block(logits, anchors, w1, w2)
                wanted = [plain(k, z).tolist() for k, z in enumerate(logits)]
                both.equal.append(("block", ids.t().tolist() == wanted))
                return ids, stats

        return Block()


TINY: dict[str, Any] = {
    "num_hidden_layers": 1, "compress_ratios": [4, 0], "dspark_target_layer_ids": [0], "vocab_size": 200,
    "n_routed_experts": 2,
}  # fmt: skip


def test_a_model_by_kernels_chooses_by_kernels_what_plain_torch_would() -> None:
    """One round: greedy, drawn by the client's seed, and by odds."""
    device = torch.device(DEVICE)
    config = ModelConfig.from_dict(FIELDS | SMALL | TINY)
    model, weights = dummy(config, TritonOps(device), torch.bfloat16, DEEPSEEK_LAYOUT)
    state = KVState(config, 4, 5, 5, device, torch.bfloat16)
    speculation = Speculation(load_drafter(config, weights, model), state, "compact")
    runner = StepRunner(model, state, (1,), speculation)
    assert isinstance(runner.choices, DeviceChoices), "Triton's operations bring their own choices"
    both = BothWays(runner.choices, 4, (1,))
    driver = SpecDriver(StepRunner(model, state, (1,), speculation, choices=both))
    mix = [Sampling(20, temperature=0.0), Sampling(20, seed=3, seeded=True), Sampling(20, seed=4)]
    streams = [driver.stream(slot, [30 + slot], one, 8) for slot, one in enumerate(mix, 1)]
    driver.round(*((stream, 1) for stream in streams))
    driver.round(*((stream, driver.width) for stream in streams))
    model.ops.check()
    assert both.equal == [(what, True) for what in ("sample", "block", "accept", "statistics")]
    assert not any(stream.errors for stream in streams)
