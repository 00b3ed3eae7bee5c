"""Decoder layers of a draft model: the backbone's layer with window attention alone, on a DraftState."""

from __future__ import annotations

from torch import Tensor

from engine.model.attention import LayerStep
from engine.model.config import ModelConfig
from engine.model.draft_ring import BlockShape, DraftState, unpacked
from engine.model.model import DeepseekV4, Layer
from engine.model.parallel import LocalExperts
from engine.model.rope import plain_frequencies
from engine.model.step import Turns, of_blocks
from engine.model.weights import LayerWeights


class DraftLayers:
    """Layers whose experts are all here, on a target's operations.

    config  the draft's geometry
    """

    def __init__(self, config: ModelConfig, weights: tuple[LayerWeights, ...], model: DeepseekV4) -> None:
        self.config, self.model, self.ops = config, model, model.ops
        self.layers = [Layer(config, own, self.ops, LocalExperts()) for own in weights]
        self.frequencies = plain_frequencies(config).to(model.device)

    def turns(self, positions: Tensor) -> Tensor:
        """Rotations [n, 1, rope_dim / 2] at positions [n]."""
        return self.ops.turns(positions, self.frequencies)

    def forward(
        self, state: DraftState, streams: Tensor, ids: Tensor, packed: Tensor, shape: BlockShape
    ) -> Tensor:
        """Streams [T, hc, H] through every layer; ids [T] are the rows' tokens. Writes the plan's rows.

        packed, shape  the plan's, on the device
        """
        rows = unpacked(packed, shape, single_rows=self.ops.row_tile > 1)
        plain, undone = self.ops.turns_and_back(rows.positions, self.frequencies)
        back = of_blocks(undone, rows.blocks)
        both = Turns(plain, back, plain, back, None, ())
        entered, last = self.layers[0].enter(streams), self.layers[-1]
        for stage, layer in enumerate(self.layers):
            step = LayerStep(
                self.config, self.ops, self.model.rounding, False, 0, rows, both, state.cache(stage), None
            )
            entered = layer.attention(entered, step)
            dispatched = layer.dispatch(entered, ids, rows)
            y = layer.combine(dispatched, layer.experts(dispatched))
            if layer is not last:
                entered = self.layers[stage + 1].follow(entered, y)
        return last.leave(entered, y)
