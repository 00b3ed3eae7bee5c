"""Sampling parameters of every request slot: numbers on the device, decisions on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import BadRequest
from engine.messages import Sampling, SlotBind
from engine.runner.columns import Upload
from engine.runner.randomness import request_keys

TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(6)
KEY, TOP_K = range(2)


@dataclass(frozen=True, slots=True)
class Features:
    """What one slot's sampling needs; known on the host, so that no step computes what no row asked for.

    repeats          sampled, and by the client's own seed: each token is the one that plain decoding draws
    top_k            host copy of the limit, 0 off
    stop_from        first position at which EOS and stop tokens may be sampled
    logprobs         -1 none, k >= 0 the chosen token's and the k best
    prompt_logprobs  the same for prompt tokens
    """

    greedy: bool
    filtered: bool
    top_k: int
    penalised: bool
    biased: bool
    stop_from: int
    logprobs: int
    prompt_logprobs: int
    repeats: bool

    @property
    def by_odds(self) -> bool:
        """Whether drafts are accepted by odds; else a draft is accepted where it is the one token to come."""
        return not (self.greedy or self.repeats)

    def edits_logits(self, position: int) -> bool:
        """Whether the token at `position` is chosen from other numbers than the model's own logits."""
        return self.penalised or self.biased or position < self.stop_from


class SlotParameters:
    """One row a slot. Binding a slot replaces all of its row.

    floats  float32 [slots, 6], columns TEMPERATURE .. PRESENCE
    ints    int64 [slots, 2], columns KEY (of randomness.request_keys), TOP_K (0: off)
    """

    def __init__(self, slots: int, vocab_size: int, eos_ids: Sequence[int], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        self.floats = torch.zeros(slots, 6, device=device)
        self.ints = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        self.features: list[Features | None] = [None] * slots
        self.bias: dict[int, tuple[Tensor, Tensor]] = {}
        self.stops: dict[int, Tensor] = {}
        self._to = Upload(device)

    def bind(self, bind: SlotBind) -> None:
        """Give the slot to a request; BadRequest where a token id is outside the vocabulary."""
        sampling, slot = bind.sampling, bind.slot
        self.bias.pop(slot, None)
        self.stops.pop(slot, None)
        features = features_of(sampling, bind.prompt_tokens, self.vocab_size)
        self.features[slot] = features
        self.floats[slot] = self._float32(
            (
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                sampling.repetition_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        )
        seed, child, top_k = torch.tensor((sampling.seed, bind.child, features.top_k))
        self.ints[slot] = self._to.int64(torch.stack((request_keys(seed, child), top_k)).numpy())
        if sampling.logit_bias:
            ids = self._token_ids([token for token, _ in sampling.logit_bias], "logit_bias")
            self.bias[slot] = (ids, self._float32([value for _, value in sampling.logit_bias]))
        if sampling.min_new_tokens > 0:
            self.stops[slot] = self._token_ids((*self.eos_ids, *sampling.stop_token_ids), "stop_token_ids")

    def of(self, slot: int) -> Features:
        """Features of a bound slot; BadRequest where nothing is bound."""
        features = self.features[slot]
        if features is None:
            raise BadRequest(f"slot {slot} is sampled before it is bound")
        return features

    def _token_ids(self, ids: Sequence[int], param: str) -> Tensor:
        wrong = [token for token in ids if not 0 <= token < self.vocab_size]
        if wrong:
            raise BadRequest(f"{param} names token {wrong[0]}, the vocabulary has {self.vocab_size}", param)
        return self._to.int64(np.array(ids, np.int64))

    def _float32(self, values: Sequence[float]) -> Tensor:
        return self._to.tensor(np.array(values, np.float32))


def features_of(sampling: Sampling, prompt_tokens: int, vocab_size: int) -> Features:
    """The features that a request's parameters ask for."""
    top_k = sampling.top_k if sampling.top_k < vocab_size else 0
    greedy = sampling.temperature == 0.0 or sampling.top_k == 1
    return Features(
        greedy=greedy,
        top_k=top_k,
        filtered=top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0,
        penalised=(
            sampling.repetition_penalty != 1.0
            or sampling.frequency_penalty != 0.0
            or sampling.presence_penalty != 0.0
        ),
        biased=bool(sampling.logit_bias),
        stop_from=prompt_tokens + sampling.min_new_tokens if sampling.min_new_tokens > 0 else 0,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        repeats=sampling.seeded and not greedy,
    )
