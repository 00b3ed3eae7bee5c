"""What the requests in the slots asked for: sampling parameters, counts, prompts whose tokens are scored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import BadRequest
from engine.memory.pools import KVState
from engine.messages import SlotBind
from engine.runner.parameters import SlotParameters
from engine.runner.penalties import TokenCounts

Int32 = npt.NDArray[np.int32]


class Bindings:
    """One entry a slot; binding a slot replaces all of it.

    prompts  of slots whose prompt tokens are scored
    broken   why a slot's request can't be sampled
    """

    def __init__(self, slots: int, vocab_size: int, eos_ids: Sequence[int], device: torch.device) -> None:
        self.parameters = SlotParameters(slots, vocab_size, eos_ids, device)
        self.counts = TokenCounts(slots, vocab_size, device)
        self.prompts: dict[int, Int32] = {}
        self.broken: dict[int, str] = {}

    def bind(self, state: KVState, bind: SlotBind) -> None:
        """Bind a slot; parameters that can't be bound break this request alone."""
        state.bind(bind.slot, bind.generation)
        self.prompts.pop(bind.slot, None)
        self.broken.pop(bind.slot, None)
        try:
            self.parameters.bind(bind)
            if self.parameters.of(bind.slot).penalised:
                self.counts.bind(bind.slot, bind.prompt, bind.prompt_tokens)
            if bind.sampling.prompt_logprobs >= 0:
                prompt = np.frombuffer(bind.prompt, np.int32)[: bind.prompt_tokens]
                if len(prompt) < bind.prompt_tokens:
                    raise BadRequest(f"prompt logprobs need {bind.prompt_tokens} tokens, {len(prompt)} came")
                self.prompts[bind.slot] = prompt
        except Exception as error:
            self.broken[bind.slot] = str(error)

    def scored(self, slot: int, start: int, count: int) -> range:
        """Positions of the rows in `start` .. `start + count` whose next prompt token is scored."""
        if slot not in self.prompts or slot in self.broken:
            return range(0)
        return range(start, max(start, min(start + count, len(self.prompts[slot]) - 1)))
