"""Products with bfloat16 weights in float32, in parts, and what adds them up."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ShapeMismatch
from engine.kernels.triton import project, routing
from tests.kernels.triton.cases import DEVICE, distance, seeded, values

FP32 = 1e-5
"""Float32 sums in another order."""


@pytest.mark.parametrize(
    ("rows", "outputs", "columns"), [(0, 64, 128), (1, 256, 640), (3, 70, 200), (65, 8, 96)]
)
def test_parts_add_up_to_the_product(rows: int, outputs: int, columns: int) -> None:
    x, weight = values(rows, rows, columns), values(7, outputs, columns)
    parts = project.project(x, weight)
    assert parts.shape[1:] == (rows, outputs)
    assert parts.dtype == torch.float32
    wanted = x.double() @ weight.double().t()
    assert distance(parts.double().sum(0), wanted) < FP32
    biases = torch.randn(3, outputs, generator=seeded(2), device=DEVICE)
    at, out = torch.arange(rows, device=DEVICE) % 3, torch.empty(rows, outputs, device=DEVICE)
    project.add_parts(parts, biases, at, out)
    assert distance(out, wanted + biases[at]) < FP32
    with pytest.raises(ShapeMismatch):
        project.add_parts(parts, biases[:, 1:], at, out)
    with pytest.raises(ShapeMismatch):
        project.project(x.float(), weight)


@pytest.mark.parametrize(
    ("rows", "outputs", "columns"), [(0, 64, 128), (1, 70, 200), (1, 256, 512), (1, 3, 8192), (3, 70, 200)]
)
def test_a_product_is_added_to_biases(rows: int, outputs: int, columns: int) -> None:
    x, weight = values(rows, rows, columns), values(7, outputs, columns)
    biases = torch.randn(3, outputs, generator=seeded(2), device=DEVICE)
    at, out = torch.arange(rows, device=DEVICE) + 2, torch.empty(rows, outputs, device=DEVICE)
    project.project_to(x, weight, biases, at % 3, out)
    assert distance(out, x.double() @ weight.double().t() + biases[at % 3]) < FP32
    with pytest.raises(ShapeMismatch):
        project.project_to(x, weight, biases[:, 1:], at, out)
    with pytest.raises(ShapeMismatch):
        project.project_to(x[:, 1:], weight, biases, at, out)


@pytest.mark.parametrize("split", [1, 4, 32])
def test_parts_of_logits_are_added_up_where_experts_are_chosen(split: int) -> None:
    # Sums of these are exact in any order.
    parts = torch.randint(-64, 64, (split, 5, 24), generator=seeded(split), device=DEVICE).float() / 16
    tokens, bias = torch.arange(5, device=DEVICE), torch.rand(24, generator=seeded(1), device=DEVICE)
    ids, weights = routing.route(parts, tokens, bias, None, 3, 1.5)
    wanted, right = routing.route(parts.sum(0), tokens, bias, None, 3, 1.5)
    assert torch.equal(ids, wanted)
    assert torch.equal(weights, right)
