"""Logprobs are natural logarithms of the raw target distribution, in ragged columns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.runner.logprobs import columns, message, nothing_chosen, token_logprobs


def test_logprobs_equal_the_log_softmax_and_tops_are_its_best() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 3
    tokens = torch.tensor([3, 0, 49, 7])
    found = token_logprobs(logits, tokens, (0, 2, 5, 1))
    for row in range(4):
        values = logits[row].tolist()
        normaliser = math.log(sum(math.exp(v) for v in values))
        assert float(found.chosen[row]) == pytest.approx(values[tokens[row]] - normaliser, abs=1e-5)
        ranked = sorted(range(50), key=lambda token: -values[token])[: found.tops[row]]
        assert found.ids[row, : found.tops[row]].tolist() == ranked
        assert found.values[row, : found.tops[row]].tolist() == pytest.approx(
            [values[t] - normaliser for t in ranked], abs=1e-5
        )


def test_columns_hold_only_what_each_row_asked_for() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    found = token_logprobs(logits, torch.tensor([1, 2]), (3, 0))
    got = columns(4, (1, 3), found)
    chosen = np.frombuffer(got.chosen, np.float32)
    assert np.isnan(chosen[[0, 2]]).all()
    assert chosen[[1, 3]].tolist() == found.chosen.tolist()
    assert list(got.top_counts) == [0, 3, 0, 0]
    assert np.frombuffer(got.top_ids, np.int32).tolist() == found.ids[0].tolist()
    assert np.frombuffer(got.top_values, np.float32).tolist() == found.values[0].tolist()


def test_a_message_keeps_output_and_prompt_columns_apart() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    prompt = columns(2, (0, 1), token_logprobs(logits, torch.tensor([1, 2]), (1, 1)))
    built = message(nothing_chosen(3), prompt, [(0, 4), (0, 5)])
    assert np.frombuffer(built.prompt_rows, np.int32).reshape(-1, 2).tolist() == [[0, 4], [0, 5]]
    assert np.isnan(np.frombuffer(built.chosen, np.float32)).all()
    assert len(built.top_counts) == 3
    assert len(built.prompt_chosen) == 8
