"""Tokens that a mask leaves out become minus infinity, and nothing else changes; the oracle is numpy's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import ShapeMismatch
from engine.kernels import cpu_masks
from engine.kernels.cpu_masks import forbid, greatest
from engine.native import NEEDS, load, processor_flags
from tests.native.test_sanitizers import FLAGS, NATIVE, compiler, needs_runtime

LEVELS = [name for name, needs in NEEDS.items() if processor_flags().issuperset(needs)]
DRIVER = Path(__file__).parents[2] / "native" / "mask_driver.c"


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    made = load(request.param)
    monkeypatch.setattr(cpu_masks, "kernels", lambda: made)
    return str(request.param)


def random_masks(chance: np.random.Generator, rows: int, vocabulary: int) -> torch.Tensor:
    """Words of all kinds: none, all, and some of their bits; where the vocabulary is odd, one too many."""
    masks = chance.integers(0, 2**32, (rows, -(-vocabulary // 32) + vocabulary % 2), np.uint32)
    masks[chance.random(masks.shape) < 0.3] = 0
    masks[chance.random(masks.shape) < 0.3] = 2**32 - 1
    return torch.from_numpy(masks.view(np.int32))


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 250, 8192])
@pytest.mark.parametrize("rows", [(0, 1, 2, 3, 4), (1, 3), (4,), ()])
def test_forbidden_tokens_alone_become_minus_infinity(
    level: str, vocabulary: int, rows: tuple[int, ...]
) -> None:
    """Masks of words of all kinds: none, all, and some of their bits."""
    chance = np.random.default_rng(vocabulary)
    masks = random_masks(chance, len(rows), vocabulary)
    logits = torch.from_numpy(chance.normal(size=(5, vocabulary)).astype(np.float32))
    logits[0, 0] = float("nan")
    wanted = logits.numpy().copy()
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, count=vocabulary, bitorder="little")
    for row, own in zip(rows, bits, strict=True):
        wanted[row][own == 0] = -np.inf
    forbid(logits, torch.tensor(rows, dtype=torch.int64), masks)
    assert np.array_equal(logits.numpy(), wanted, equal_nan=True)


def test_rows_of_a_wider_tensor_leave_what_is_beside_them(level: str) -> None:
    whole = torch.zeros(3, 70)
    forbid(whole[:, 2:66], torch.tensor([1]), torch.zeros(1, 2, dtype=torch.int32))
    wanted = torch.zeros(3, 70)
    wanted[1, 2:66] = float("-inf")
    assert torch.equal(whole, wanted)


def test_masks_that_are_no_masks_of_these_rows_are_refused(level: str) -> None:
    logits, masks = torch.zeros(3, 64), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ShapeMismatch, match="2 rows of 64 tokens"):
        forbid(logits, torch.tensor([0, 1]), masks)
    with pytest.raises(ShapeMismatch, match="1 rows of 65 tokens"):
        forbid(torch.zeros(3, 65), torch.tensor([0]), masks)
    with pytest.raises(ShapeMismatch, match="strides"):
        forbid(torch.zeros(64, 3).T, torch.tensor([0]), masks)
    for row in (-1, 3):
        with pytest.raises(ValueError, match="none of 3 rows"):
            forbid(logits, torch.tensor([row]), masks)
    assert (logits == 0).all()


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 250, 8192])
@pytest.mark.parametrize("rows", [(0, 1, 2, 3, 4), (1, 3), (4,), ()])
def test_the_greatest_logit_is_found_among_what_a_mask_allows(
    level: str, vocabulary: int, rows: tuple[int, ...]
) -> None:
    """Few values, so that there are ties: the first token has it. The logits stay as they are."""
    chance = np.random.default_rng(vocabulary)
    masks = random_masks(chance, len(rows), vocabulary)
    for spread in (3, 10**6):
        values = chance.integers(-spread, spread, (5, vocabulary)).astype(np.float32)
        logits = torch.from_numpy(values)
        wanted, index = logits.clone(), torch.tensor(rows, dtype=torch.int64)
        forbid(wanted, index, masks)
        best, tokens = greatest(logits, index, masks)
        assert torch.equal(best, wanted.amax(1))
        assert np.array_equal(tokens.numpy(), wanted.numpy().argmax(1))
        assert np.array_equal(logits.numpy(), values)
        assert torch.equal(greatest(wanted)[1], tokens)


def test_no_number_is_the_greatest_where_it_is_allowed(level: str) -> None:
    logits = torch.ones(3, 70)
    logits[:, 69] = logits[:, 40] = float("nan")
    logits[:, 68] = float("inf")
    masks = torch.full((2, 3), -1, dtype=torch.int32)
    masks[0, 1:] = 0
    masks[1, 1], masks[1, 2] = 0, 1 << 4
    best, tokens = greatest(logits, torch.tensor([0, 2]), masks)
    assert tokens.tolist() == [0, 40, 68]
    assert best[0] == 1
    assert best[1].isnan()
    assert best[2] == float("inf")
    nothing = greatest(logits, torch.tensor([1]), torch.zeros(1, 3, dtype=torch.int32))
    assert [part[1].item() for part in nothing] == [float("-inf"), 0]


def test_a_greatest_logit_of_no_rows_or_of_masks_in_disorder(level: str) -> None:
    assert [part.shape for part in greatest(torch.zeros(0, 64))] == [(0,), (0,)]
    logits, masks = torch.zeros(3, 64), torch.zeros(2, 2, dtype=torch.int32)
    for rows in ((1, 0), (1, 1), (2, 3), (-1, 0)):
        with pytest.raises(ValueError, match="ascending ones of 3 rows"):
            greatest(logits, torch.tensor(rows), masks)
    with pytest.raises(ShapeMismatch, match="1 rows of 64 tokens"):
        greatest(logits, torch.tensor([0]), masks)
    with pytest.raises(ShapeMismatch, match="strides"):
        greatest(torch.zeros(64, 3).T)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_no_byte_outside_the_rows_is_touched(tmp_path: Path) -> None:
    """Every size is its own allocation, whose ends the sanitizer watches."""
    needs_runtime("address,undefined", tmp_path)
    flags = [flag for flag in FLAGS if flag != "-std=c11"] + ["-std=gnu11", "-Wno-psabi"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(DRIVER), str(NATIVE / "mask.c")]
    command = [compiler(), *flags, *sanitize, f"-I{NATIVE}", *sources, "-o", str(tmp_path / "driver"), "-lm"]
    subprocess.run(command, check=True)
    ran = subprocess.run([tmp_path / "driver"], capture_output=True, text=True, check=False, timeout=30)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == "masks of 200 sizes\n"
