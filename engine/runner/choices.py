"""How a runner chooses tokens from logits: by plain torch here, by kernels in `device_choices.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.messages import SlotBind
from engine.model.draft import Choose
from engine.runner.acceptance import Acceptance, Accepted
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.edits import MaskWords
from engine.runner.logprobs import TokenLogprobs, token_logprobs
from engine.runner.parameters import SlotParameters
from engine.runner.penalties import TokenCounts
from engine.runner.sampling import Chosen, Rows, Sampler


class Choices(Protocol):
    """Chooses tokens for the requests of slots. Every way gives the same tokens for the same logits.

    Where the last bit of an edited logit or of a sum decides, tokens may differ.

    name        what logs and metrics call it
    parameters  of the slots
    """

    name: str
    parameters: SlotParameters

    def bind(self, bind: SlotBind) -> None:
        """A slot has a new request. raises BadRequest where its parameters or its tokens can't be used"""

    def warm(self, slot: int, block: int) -> None:
        """Makes all that steps may want, by a bound slot without penalties; block: of a draft, or 0."""

    def sample(self, logits: Tensor, rows: Rows, mask: MaskWords | None = None) -> Chosen:
        """As Sampler.sample; logits may be changed where no row's request wants log probabilities."""

    def accept(self, logits: Tensor, rows: VerifyRows, mask: MaskWords | None = None) -> Accepted:
        """As Acceptance.accept; logits may be changed where no group's request wants log probabilities."""

    def choose(self, slots: Sequence[int], positions: Sequence[int]) -> Choose:
        """As Acceptance.choose."""

    def logprobs(self, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> TokenLogprobs:
        """As `token_logprobs`."""


class PlainChoices:
    """By plain torch, on any device: the reference."""

    name = "torch"

    def __init__(self, parameters: SlotParameters) -> None:
        device = parameters.floats.device
        self.parameters = parameters
        self._counts = TokenCounts(len(parameters.features), parameters.vocab_size, device)
        self._sampler = Sampler(parameters, self._counts)
        self._acceptance = Acceptance(parameters, self._counts)

    def bind(self, bind: SlotBind) -> None:
        """As Choices.bind."""
        self.parameters.bind(bind)
        if self.parameters.of(bind.slot).penalised:
            self._counts.bind(bind.slot, bind.prompt, bind.prompt_tokens)

    def warm(self, slot: int, block: int) -> None:
        """As Choices.warm: there is nothing to make."""

    def sample(self, logits: Tensor, rows: Rows, mask: MaskWords | None = None) -> Chosen:
        """As Choices.sample."""
        return self._sampler.sample(logits, rows, mask)

    def accept(self, logits: Tensor, rows: VerifyRows, mask: MaskWords | None = None) -> Accepted:
        """As Choices.accept."""
        return self._acceptance.accept(logits, rows, mask)

    def choose(self, slots: Sequence[int], positions: Sequence[int]) -> Choose:
        """As Choices.choose."""
        return self._acceptance.choose(slots, positions)

    def logprobs(self, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> TokenLogprobs:
        """As Choices.logprobs."""
        return token_logprobs(logits, tokens, tops)
