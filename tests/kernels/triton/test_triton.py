"""The kernels' checks, three files in a process of their own: interpreted where there is no device.

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
COMPILED = [name for name in CHECKS if name.startswith("check_compile")]
OTHER = [name for name in CHECKS if name not in COMPILED]
# A process takes three seconds to begin.
PROCESSES = [names[i : i + 3] for names in (COMPILED, OTHER) for i in range(0, len(names), 3)]


@pytest.mark.parametrize("names", PROCESSES, ids=" ".join)
def test_kernels(names: list[str]) -> None:
    # Compiling is for a device, whether there is one or not.
    env = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    if not torch.cuda.is_available() and names[0] in OTHER:
        env["TRITON_INTERPRET"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(str(Path(__file__).with_name(name)) for name in names),
    ]
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=280)
    assert told.returncode == 0, told.stdout[-4000:] + told.stderr[-2000:]
    assert " passed" in told.stdout
