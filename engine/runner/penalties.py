"""How often each slot's request has seen each token, and the penalties that follow from it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.errors import BadRequest


class TokenCounts:
    """Counts of penalised slots, kept on the device.

    prompt  bool [slots, V]; the token occurs in the prompt
    output  int32 [slots, V]; occurrences in the output so far
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.prompt = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        self.output = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)

    def bind(self, slot: int, tokens: bytes, prompt_tokens: int) -> None:
        """Start a slot's counts from its prompt and its earlier output.

        tokens  int32[n], n >= prompt_tokens; the rest was generated before a retraction
        raises  BadRequest where `tokens` is shorter than the prompt or holds ids outside the vocabulary
        """
        ids = np.frombuffer(tokens, np.int32).astype(np.int64)
        vocab_size = self.prompt.shape[1]
        if len(ids) < prompt_tokens:
            raise BadRequest(f"penalties need all {prompt_tokens} prompt tokens, {len(ids)} came")
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
            raise BadRequest(f"prompt holds a token outside the vocabulary of {vocab_size}", "prompt")
        device = self.prompt.device
        self.prompt[slot] = False
        self.prompt[slot, torch.from_numpy(ids[:prompt_tokens]).to(device)] = True
        output = np.bincount(ids[prompt_tokens:], minlength=vocab_size).astype(np.int32)
        self.output[slot] = torch.from_numpy(output).to(device)

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count one output token for each of `slots`, distinct; both int64 [n]."""
        self.output[slots, tokens] += 1

    def penalise(self, logits: Tensor, slots: Tensor, factors: Tensor) -> Tensor:
        """Logits after repetition, then frequency and presence penalties.

        logits   float32 [n, V]
        slots    int64 [n]
        factors  float32 [n, 3]: repetition, frequency, presence
        """
        repetition, frequency, presence = (column[:, None] for column in factors.unbind(-1))
        output = self.output[slots]
        seen = self.prompt[slots] | (output > 0)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        penalised = torch.where(seen, repeated, logits)
        return penalised - frequency * output - presence * (output > 0)
