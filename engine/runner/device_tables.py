"""What sampling kernels read of each slot's request, kept on the device at addresses that never change."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import BadRequest
from engine.kernels.triton.masks import EditTables, seen_row
from engine.messages import MAX_BIASES, MAX_STOP_TOKENS, SlotBind
from engine.runner.columns import Upload
from engine.runner.parameters import SlotParameters
from engine.runner.penalties import seen_tokens


class DeviceTables:
    """One row a slot. Binding a slot replaces what its request asks for, and nothing waits for that.

    edits    what changes logits; where a request asks for nothing, numbers of the one before may stand
    repeats  uint8 [S], Features.repeats
    """

    def __init__(self, parameters: SlotParameters) -> None:
        self.parameters = parameters
        slots, device = len(parameters.features), parameters.floats.device
        stops = MAX_STOP_TOKENS + len(parameters.eos_ids)

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        self.repeats = table(dtype=torch.uint8)
        self.edits = EditTables(
            floats=parameters.floats,
            seen=table(parameters.vocab_size),
            bias_ids=table(MAX_BIASES),
            bias_values=table(MAX_BIASES, dtype=torch.float32),
            bias_counts=table(),
            stop_ids=table(stops),
            stop_counts=table(),
            stop_from=table(dtype=torch.int64),
        )
        self._to = Upload(device)

    def bind(self, bind: SlotBind) -> None:
        """Fills the row of a slot whose parameters are bound.

        raises  BadRequest where the request asks for more than a row holds, or its tokens can't be counted
        """
        slot, edits, features = bind.slot, self.edits, self.parameters.of(bind.slot)
        self.repeats[slot] = int(features.repeats)
        edits.bias_counts[slot] = edits.stop_counts[slot] = 0
        edits.stop_from[slot] = features.stop_from
        if features.biased:
            ids, values = self.parameters.bias[slot]
            edits.bias_counts[slot] = _put(edits.bias_ids, slot, ids, "logit_bias")
            _put(edits.bias_values, slot, values, "logit_bias")
        if features.stop_from:
            stops = self.parameters.stops[slot]
            edits.stop_counts[slot] = _put(edits.stop_ids, slot, stops, "stop_token_ids")
        if features.penalised:
            size = self.parameters.vocab_size
            seen_tokens(bind.prompt, bind.prompt_tokens, size)
            edits.seen[slot] = self._to.tensor(seen_row(bind.prompt, bind.prompt_tokens, size).numpy())


def _put(table: Tensor, slot: int, values: Tensor, param: str) -> int:
    """Writes values at the front of a slot's row, and tells how many. raises BadRequest"""
    count, room = len(values), table.shape[1]
    if count > room:
        raise BadRequest(f"{param} names {count} tokens, {room} at most are possible", param)
    table[slot, :count] = values
    return count
