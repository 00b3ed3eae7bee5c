"""Where blocks start, what they have to say, and the loss."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.attention import CHUNK
from training.draft_model import Blocks, Draft

CE_SHARE, TV_SHARE, CONFIDENCE_SHARE = 0.1, 0.9, 1.0
# Later positions count less: they are reached less often.
DECAY = 4.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What T = B * C * A * block rows are judged by; all flat.

    labels     the token that comes after the row's place, previous: the one at it
    seen       index into [B * S] of the target's hidden row that predicts the label
    weights    float32, zero from the first label on that is of another text or unwanted
    """

    labels: Tensor
    previous: Tensor
    seen: Tensor
    weights: Tensor


def text_starts(ids: Tensor, bos: int) -> Tensor:
    """Position at which each token's text begins, [B, S]: its BOS, or the row's start."""
    positions = torch.arange(ids.shape[1], device=ids.device)
    return torch.where(ids == bos, positions, 0).cummax(1).values


def choose_blocks(
    wanted: Tensor, starts: Tensor, per_chunk: int, generator: torch.Generator | None
) -> Blocks:
    """`per_chunk` anchors a chunk, those that precede a wanted label first, by chance in proportion to it.

    wanted     [B, S] float32, how much a token counts as a label
    generator  None: all positions in order; then per_chunk is CHUNK
    """
    batch, length = wanted.shape
    first = torch.arange(0, length, CHUNK, device=wanted.device)[None, :, None]
    if generator is None:
        offsets = torch.arange(CHUNK, device=wanted.device).expand(batch, length // CHUNK, CHUNK)
    else:
        following = F.pad(wanted[:, 1:], (0, 1))
        same = F.pad(starts[:, 1:] == starts[:, :-1], (0, 1))
        noise = torch.rand(wanted.shape, generator=generator, device=wanted.device)
        keys = torch.log(following * same) - torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-7)))
        offsets = torch.topk(keys.view(batch, -1, CHUNK), per_chunk).indices.sort(-1).values
    anchors = first + offsets
    return Blocks(anchors, starts.gather(1, anchors.flatten(1)).view(anchors.shape))


def block_targets(ids: Tensor, wanted: Tensor, starts: Tensor, blocks: Blocks, block: int) -> Targets:
    """Labels, places and weights of every block row."""
    batch, length = ids.shape
    at = blocks.positions(block).view(batch, -1)
    after = (at + 1).clamp(max=length - 1)
    anchor_start = blocks.starts[..., None].expand(*blocks.starts.shape, block).reshape(batch, -1)
    weight = wanted.gather(1, after) * (starts.gather(1, after) == anchor_start) * (at + 1 < length)
    weight = weight.view(-1, block)
    alive = (weight > 0).cumprod(1)
    steps = torch.arange(block, device=ids.device)
    weight = weight * alive * torch.exp(-steps / DECAY)
    inside = at.clamp(max=length - 1)
    rows = torch.arange(batch, device=ids.device)[:, None] * length
    return Targets(
        ids.gather(1, after).flatten(),
        ids.gather(1, inside).flatten(),
        (rows + inside).flatten(),
        weight.flatten(),
    )


def losses(
    draft: Draft,
    hidden: Tensor,
    seen: Tensor,
    head: Tensor,
    labels: Tensor,
    previous: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, each row's chance of acceptance at temperature 1, and its estimate by the draft.

    hidden  [T, H] of the draft; seen [T, H], what the target scores for the same label; head [V, H]
    """
    own = draft.logits(hidden, previous, head).float()
    wanted = F.linear(seen, head).float()
    level, top = torch.logsumexp(own, -1), torch.logsumexp(wanted, -1)
    nats = level - own.gather(-1, labels[:, None])[:, 0]
    distance = (torch.exp(own - level[:, None]) - torch.exp(wanted - top[:, None])).abs().sum(-1)
    accepted = 1 - 0.5 * distance.detach()
    estimate = draft.confidence(hidden, previous)
    doubt = F.binary_cross_entropy_with_logits(estimate, accepted.clamp(0, 1), reduction="none")
    each = CE_SHARE * nats + TV_SHARE * distance + CONFIDENCE_SHARE * doubt
    total = (each * weights).sum() / weights.sum().clamp(min=1.0)
    return total, accepted, torch.sigmoid(estimate.detach())
