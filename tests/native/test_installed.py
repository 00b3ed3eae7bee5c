"""The package as it is installed elsewhere: compiled kernels, specs and the shipped model are all in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import pathlib, sys
import engine, engine.native as native
from engine.config import NANO
from engine.fsm.load import load
from engine.fsm.owners import ROOT
import torch
here = pathlib.Path(sys.argv[1])
assert pathlib.Path(engine.__file__).is_relative_to(here), engine.__file__
kernels = native.load(native.level())
assert pathlib.Path(kernels.__file__).is_relative_to(here), kernels.__file__
x, out = torch.full((2, 16), 3.0), torch.empty(2, 16)
kernels.rms_norm(out.data_ptr(), x.data_ptr(), 16, 0, 2, 16, 0.0)
assert torch.allclose(out, torch.ones(2, 16)), out
assert "idle" in load(ROOT / "specs" / "rank.toml").states
assert (NANO / "config.json").is_file()
print("installed package works")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_installed_package_has_kernels_specs_and_model(tmp_path: Path) -> None:
    """Built from a copy of the tree's files, so that nothing here is overwritten."""
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if name.startswith(("tests/", "docs/", "bench/results/")) or not (ROOT / name).is_file():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([*pip, *flags, str(source)], check=True, timeout=540)
    told = subprocess.run(
        [sys.executable, "-c", PROBE, str(target)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.stdout == "installed package works\n", told.stderr
