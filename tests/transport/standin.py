"""Builds the stand-in for the CUDA driver, and reaches into its memory, which lies in host memory."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.transport.device import DeviceRegion

SOURCE = Path(__file__).with_name("standin.c")
FLAGS = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
UNIT = 65_536


def build(folder: Path) -> str:
    """The library's path; skips where there is no compiler, or no header of CUDA's (triton brings it)."""
    compiler, triton = shutil.which(os.environ.get("CC", "cc")), find_spec("triton")
    include = Path(str(triton.origin)).parent / "backends" / "nvidia" / "include" if triton else Path()
    if compiler is None or not (include / "cuda.h").exists():
        pytest.skip("the stand-in needs a C compiler and cuda.h")
    library = folder / "libstandin.so"
    subprocess.run([compiler, *FLAGS, f"-I{include}", str(SOURCE), "-o", str(library)], check=True)
    return str(library)


def bytes_of(region: DeviceRegion) -> Any:
    """uint8 [nbytes] over the region's memory."""
    region.check_usable()
    return np.frombuffer((ctypes.c_uint8 * region.nbytes).from_address(region.address), np.uint8)
