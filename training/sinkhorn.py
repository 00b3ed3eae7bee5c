"""Sinkhorn normalisation of 4x4 matrices, one a token: plain torch on the CPU, Triton kernels on a GPU.

Forty normalisations of sixteen numbers are a few nanoseconds of arithmetic, but as separate tensor operations
they would move the matrices through memory forty times in each of sixteen places of the model.
"""

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton has no wheel for this platform; the CPU path needs none.
    triton = None

HC = 4
BLOCK = 64


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices from logits.

    logits   [T, 4, 4] float32; rows are the first of the two matrix axes
    returns  [T, 4, 4] float32; the last step normalised columns
    """
    if logits.is_cuda:
        comb: Tensor = torch.ops.training.sinkhorn(logits.contiguous(), iterations, eps)[0]
        return comb
    return sinkhorn_plain(logits, iterations, eps)


def sinkhorn_plain(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """The same, one tensor operation a step."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


if triton is not None:

    @triton.jit
    def sinkhorn_forward_kernel(x_ptr, y_ptr, s_ptr, count, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        """Writes the matrices and the 2 * ITERS - 1 sums that they were divided by."""
        token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        live = token < count
        axis = tl.arange(0, 4)
        at = token[:, None, None] * 16 + axis[None, :, None] * 4 + axis[None, None, :]
        x = tl.load(x_ptr + at, mask=live[:, None, None], other=0.0)
        e = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
        c = e / tl.sum(e, axis=2, keep_dims=True) + eps
        sums = s_ptr + token * ((2 * ITERS - 1) * 4)
        column = tl.sum(c, axis=1, keep_dims=True) + eps
        tl.store(sums[:, None, None] + axis[None, None, :], column, mask=live[:, None, None])
        c = c / column
        for i in range(ITERS - 1):
            row = tl.sum(c, axis=2, keep_dims=True) + eps
            tl.store(sums[:, None, None] + (8 * i + 4) + axis[None, :, None], row, mask=live[:, None, None])
            c = c / row
            column = tl.sum(c, axis=1, keep_dims=True) + eps
            tl.store(
                sums[:, None, None] + (8 * i + 8) + axis[None, None, :], column, mask=live[:, None, None]
            )
            c = c / column
        tl.store(y_ptr + at, c, mask=live[:, None, None])

    @triton.jit
    def sinkhorn_backward_kernel(
        y_ptr, s_ptr, g_ptr, out_ptr, count, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Walks the divisions back: each earlier matrix is the later one times its stored sum."""
        token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        live = token < count
        axis = tl.arange(0, 4)
        at = token[:, None, None] * 16 + axis[None, :, None] * 4 + axis[None, None, :]
        c = tl.load(y_ptr + at, mask=live[:, None, None], other=0.25)
        g = tl.load(g_ptr + at, mask=live[:, None, None], other=0.0)
        sums = s_ptr + token * ((2 * ITERS - 1) * 4)
        for k in range(ITERS - 1):
            i = ITERS - 2 - k
            column = tl.load(
                sums[:, None, None] + (8 * i + 8) + axis[None, None, :], live[:, None, None], 1.0
            )
            g = (g - tl.sum(g * c, axis=1, keep_dims=True)) / column
            c = c * column
            row = tl.load(sums[:, None, None] + (8 * i + 4) + axis[None, :, None], live[:, None, None], 1.0)
            g = (g - tl.sum(g * c, axis=2, keep_dims=True)) / row
            c = c * row
        column = tl.load(sums[:, None, None] + axis[None, None, :], live[:, None, None], 1.0)
        g = (g - tl.sum(g * c, axis=1, keep_dims=True)) / column
        p = c * column - eps
        g = p * (g - tl.sum(g * p, axis=2, keep_dims=True))
        tl.store(out_ptr + at, g, mask=live[:, None, None])


@torch.library.custom_op("training::sinkhorn", mutates_args=())
def _sinkhorn(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    """Matrices [T, 4, 4] and the divisors [T, 2 * iterations - 1, 4] that the gradient needs."""
    count = logits.shape[0]
    comb = torch.empty_like(logits)
    sums = logits.new_empty(count, 2 * iterations - 1, HC)
    grid = ((count + BLOCK - 1) // BLOCK,)
    sinkhorn_forward_kernel[grid](logits, comb, sums, count, eps, ITERS=iterations, BLOCK=BLOCK, num_warps=2)
    return comb, sums


@_sinkhorn.register_fake
def _(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits), logits.new_empty(logits.shape[0], 2 * iterations - 1, HC)


@torch.library.custom_op("training::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward(comb: Tensor, sums: Tensor, grad: Tensor, iterations: int, eps: float) -> Tensor:
    """Gradient of the logits from that of the matrices."""
    count = comb.shape[0]
    out = torch.empty_like(comb)
    grid = ((count + BLOCK - 1) // BLOCK,)
    sinkhorn_backward_kernel[grid](
        comb, sums, grad.contiguous(), out, count, eps, ITERS=iterations, BLOCK=BLOCK, num_warps=2
    )
    return out


@_sinkhorn_backward.register_fake
def _(comb: Tensor, sums: Tensor, grad: Tensor, iterations: int, eps: float) -> Tensor:
    return torch.empty_like(comb)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.iterations, ctx.eps = inputs[1], inputs[2]
    ctx.save_for_backward(*output)


def _gradient(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    comb, sums = ctx.saved_tensors
    return torch.ops.training.sinkhorn_backward(comb, sums, grad, ctx.iterations, ctx.eps), None, None


_sinkhorn.register_autograd(_gradient, setup_context=_keep)
