"""The kernels' checks, each file in a process of its own: interpreted where there is no device.

Triton reads TRITON_INTERPRET when it is imported, and this process may have imported it, or may later.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = sorted(path.name for path in Path(__file__).parent.glob("check_*.py"))


@pytest.mark.parametrize("name", CHECKS)
def test_kernels(name: str) -> None:
    # Compiling is for a device, whether there is one or not.
    env = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    interpreted = not torch.cuda.is_available() and not name.startswith("check_compile")
    if interpreted:
        env["TRITON_INTERPRET"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name(name)),
    ]
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=110)
    assert told.returncode == 0, told.stdout[-4000:] + told.stderr[-2000:]
    assert " passed" in told.stdout
