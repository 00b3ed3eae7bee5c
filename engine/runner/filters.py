"""Top-k, top-p and min-p as one threshold a row: a token stays where its logit reaches the threshold.

Tokens that tie with the last one kept are kept too: a result then never depends on how a sort orders equal
logits, nor on the other rows of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The nucleus of almost every row of a trained model has fewer tokens; longer ones are sorted whole.
_NUCLEUS_PREFIX = 1024


def keep_thresholds(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, largest_k: int) -> Tensor:
    """Smallest scaled logit that stays, a row; filters apply in the order top-k, top-p, min-p.

    scaled     float32 [n, V]: logits minus the row's largest, divided by its temperature
    top_k      int64 [n], 0 off;  top_p float32 [n], 1 off;  min_p float32 [n], 0 off
    largest_k  largest top_k of the rows; 0 where some row with top_p < 1 has none
    returns    float32 [n], never above 0
    """
    vocab_size = scaled.shape[-1]
    prefix = largest_k if largest_k > 0 else max(_NUCLEUS_PREFIX, int(top_k.max()))
    if scaled.is_cuda or prefix * 4 > vocab_size:
        prefix = vocab_size
    threshold, is_open = _sorted_thresholds(scaled, top_k, top_p, prefix)
    if prefix < vocab_size and largest_k == 0 and bool(is_open.any()):
        rows = is_open.nonzero()[:, 0]
        threshold[rows], _ = _sorted_thresholds(scaled[rows], top_k[rows], top_p[rows], vocab_size)
    return torch.maximum(threshold, min_p.log())


def _sorted_thresholds(scaled: Tensor, top_k: Tensor, top_p: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Threshold a row from its `prefix` largest logits, and whether its nucleus may be longer than that."""
    vocab_size = scaled.shape[-1]
    best = scaled.topk(prefix, -1).values
    limit = torch.where(top_k > 0, top_k, vocab_size)[:, None]
    rank = torch.arange(prefix, device=scaled.device)
    weights = torch.where(rank < limit, best.exp().to(torch.float64), 0.0)
    below = weights.cumsum(-1) - weights
    # Without top-k the share is of the whole row, also where only a prefix is sorted.
    whole = scaled.exp().sum(-1, dtype=torch.float64)
    total = torch.where(top_k > 0, weights.sum(-1), whole)[:, None]
    in_nucleus = (below < top_p[:, None] * total) | (top_p >= 1.0)[:, None]
    kept = (in_nucleus & (rank < limit)).sum(-1)
    last = best.gather(-1, (kept - 1).clamp_min(0)[:, None])[:, 0]
    unlimited = (top_k == 0) & (top_p >= 1.0)
    threshold = torch.where(unlimited, float("-inf"), last)
    return threshold, (kept == prefix) & (top_k == 0) & ~unlimited
