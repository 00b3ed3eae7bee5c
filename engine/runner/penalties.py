"""How often each slot's request has seen each token, and the penalties that follow from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.errors import BadRequest

_FIRST_ROOM = 256


class TokenCounts:
    """Counts of penalised slots, kept on the device. A penalty touches only tokens that were seen.

    output  int32 [slots, V], occurrences in the output so far
    seen    int32 [slots, room], tokens of prompt and output, repeats allowed; a row's rest repeats its first
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.output = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(slots, _FIRST_ROOM, dtype=torch.int32, device=device)
        self._lengths = [0] * slots

    def bind(self, slot: int, tokens: bytes, prompt_tokens: int) -> None:
        """Start a slot's counts from its prompt and its earlier output.

        tokens  int32[n], n >= prompt_tokens; the rest was generated before a retraction
        raises  BadRequest where `tokens` is shorter than the prompt or holds ids outside the vocabulary
        """
        ids = np.frombuffer(tokens, np.int32)
        vocab_size = self.output.shape[1]
        if len(ids) < max(prompt_tokens, 1):
            raise BadRequest(f"penalties need all {prompt_tokens} prompt tokens, {len(ids)} came")
        if not (ids.min() >= 0 and ids.max() < vocab_size):
            raise BadRequest(f"prompt holds a token outside the vocabulary of {vocab_size}", "prompt")
        unique = np.unique(ids)
        self._make_room(len(unique))
        self.seen[slot] = int(unique[0])
        self.seen[slot, : len(unique)] = torch.from_numpy(unique).to(self.seen.device)
        self._lengths[slot] = len(unique)
        output = np.bincount(ids[prompt_tokens:], minlength=vocab_size).astype(np.int32)
        self.output[slot] = torch.from_numpy(output).to(self.output.device)

    def add(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Count one output token for each of `slots`, distinct; tokens int64 [n]."""
        self._make_room(max(self._lengths[slot] for slot in slots) + 1)
        index = torch.tensor(slots, device=tokens.device)
        places = torch.tensor([self._lengths[slot] for slot in slots], device=tokens.device)
        self.output[index, tokens] += 1
        self.seen[index, places] = tokens.to(torch.int32)
        for slot in slots:
            self._lengths[slot] += 1

    def penalise(self, logits: Tensor, slots: Sequence[int], factors: Tensor) -> Tensor:
        """Logits [n, V] float32 after repetition, then frequency and presence penalties; changed in place.

        factors  float32 [n, 3]: repetition, frequency, presence
        """
        index = torch.tensor(slots, device=logits.device)
        ids = self.seen[index, : max(self._lengths[slot] for slot in slots)].to(torch.int64)
        repetition, frequency, presence = (column[:, None] for column in factors.unbind(-1))
        counts = self.output[index[:, None], ids]
        before = logits.gather(-1, ids)
        repeated = torch.where(before > 0, before / repetition, before * repetition)
        after = repeated - frequency * counts - presence * (counts > 0)
        # A repeated id is written more than once, always with the same value.
        return logits.scatter_(-1, ids, after)

    def _make_room(self, tokens: int) -> None:
        room = self.seen.shape[1]
        if tokens > room:
            more = max(tokens, 2 * room) - room
            self.seen = torch.cat((self.seen, self.seen[:, :1].expand(-1, more)), dim=1)
