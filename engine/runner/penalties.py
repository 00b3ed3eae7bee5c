"""How often each slot's request has seen each token, and the penalties that follow from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import BadRequest

_FIRST_ROOM = 256


def seen_tokens(tokens: bytes, prompt_tokens: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """A request's prompt, and what was generated before a retraction.

    tokens  int32[n], n >= prompt_tokens
    raises  BadRequest where `tokens` is shorter than the prompt or holds ids outside the vocabulary
    """
    ids = np.frombuffer(tokens, np.int32)
    if len(ids) < max(prompt_tokens, 1):
        raise BadRequest(f"penalties need all {prompt_tokens} prompt tokens, {len(ids)} came")
    if not (ids.min() >= 0 and ids.max() < vocab_size):
        raise BadRequest(f"prompt holds a token outside the vocabulary of {vocab_size}", "prompt")
    return ids


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

        Arguments and errors are those of `seen_tokens`.
        """
        vocab_size = self.output.shape[1]
        ids = seen_tokens(tokens, prompt_tokens, vocab_size)
        unique = np.unique(ids)
        self._make_room(len(unique))
        self.seen[slot] = int(unique[0])
        self.seen[slot, : len(unique)] = torch.from_numpy(unique).to(self.seen.device)
        self._lengths[slot] = len(unique)
        output = np.bincount(ids[prompt_tokens:], minlength=vocab_size).astype(np.int32)
        self.output[slot] = torch.from_numpy(output).to(self.output.device)

    def add(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Count one output token for each of `slots`, which may repeat; tokens int64 [n]."""
        places = []
        for slot in slots:
            places.append(self._lengths[slot])
            self._lengths[slot] += 1
        self._make_room(max(places, default=0) + 1)
        index = torch.tensor(slots, device=tokens.device)
        one = torch.ones((), dtype=torch.int32, device=tokens.device)
        self.output.index_put_((index, tokens), one, accumulate=True)
        self.seen[index, torch.tensor(places, device=tokens.device)] = tokens.to(torch.int32)

    def penalise(
        self,
        logits: Tensor,
        rows: Tensor,
        slots: Sequence[int],
        factors: Tensor,
        drafted: Tensor | None = None,
    ) -> None:
        """Repetition, then frequency and presence penalties on some rows of the logits, in place.

        logits   float32 [R, V], contiguous
        rows     int64 [n], distinct; slots [n], the slot of each
        factors  float32 [n, 3]: repetition, frequency, presence
        drafted  int64 [n, gamma], output that is not counted yet but that this row has seen; -1: none
        """
        index = torch.tensor(slots, device=logits.device)
        ids = self.seen[index, : max(self._lengths[slot] for slot in slots)].to(torch.int64)
        repetition, frequency, presence = (column[:, None] for column in factors.unbind(-1))
        if drafted is not None:
            ids = torch.cat((ids, torch.where(drafted >= 0, drafted, ids[:, :1])), dim=1)
        counts = self.output[index[:, None], ids]
        for column in () if drafted is None else drafted.unbind(-1):
            counts += ids == column[:, None]
        cells = (rows[:, None] * logits.shape[1] + ids).view(-1)
        flat = logits.view(-1)
        before = flat.gather(0, cells).view(ids.shape)
        repeated = torch.where(before > 0, before / repetition, before * repetition)
        after = repeated - frequency * counts - presence * (counts > 0)
        # A repeated id is written more than once, always with the same value.
        flat.scatter_(0, cells, after.view(-1))

    def _make_room(self, tokens: int) -> None:
        room = self.seen.shape[1]
        if tokens > room:
            more = max(tokens, 2 * room) - room
            self.seen = torch.cat((self.seen, self.seen[:, :1].expand(-1, more)), dim=1)
