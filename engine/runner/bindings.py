"""What the requests in the slots asked for: sampling parameters, counts, prompts whose tokens are scored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.errors import BadRequest
from engine.memory.pools import KVState
from engine.messages import SlotBind
from engine.runner.choices import Choices

Int32 = npt.NDArray[np.int32]


class Bindings:
    """One entry a slot; binding a slot replaces all of it.

    choices  of their tokens
    prompts  of slots whose prompt tokens are scored
    broken   why a slot's request can't be sampled
    """

    def __init__(self, choices: Choices) -> None:
        self.choices, self.parameters = choices, choices.parameters
        self.prompts: dict[int, Int32] = {}
        self.broken: dict[int, str] = {}

    def bind(self, state: KVState, bind: SlotBind) -> None:
        """Bind a slot; parameters that can't be bound break this request alone."""
        state.bind(bind.slot, bind.generation)
        self.prompts.pop(bind.slot, None)
        self.broken.pop(bind.slot, None)
        try:
            self.choices.bind(bind)
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
