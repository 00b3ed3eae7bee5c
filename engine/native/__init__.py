"""C11 sources built by the package, and the choice of the build that this processor runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, cast

from engine.errors import ConfigError

# What the compiler's level x86-64-v3 and -v4 may use, as the kernel spells it.
NEEDS = {
    "v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi2"),
    "v3": ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"),
    "base": (),
}


class CpuKernels(Protocol):
    """The C kernels; arguments are addresses and sizes, described in the headers beside this file."""

    def pack(self, *args: int) -> None: ...
    def gemm(self, *args: int) -> None: ...
    def rms_norm(self, *args: float) -> None: ...
    def rotate(self, *args: int) -> None: ...
    def mhc_pre(self, *args: float) -> None: ...
    def mhc_post(self, *args: int) -> None: ...
    def attend(self, *args: float) -> None: ...
    def index_scores(self, *args: int) -> None: ...
    def swiglu(self, *args: float) -> None: ...
    def moe(self, *args: float) -> None: ...
    def route(self, *args: float) -> None: ...
    def pool_windows(self, *args: int) -> None: ...
    def fold(self, *args: int) -> None: ...
    def forbid(self, *args: int) -> None: ...
    def favour(self, *args: int) -> None: ...


def processor_flags() -> frozenset[str]:
    """Instruction-set flags of the first processor; empty where the system doesn't say."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return frozenset()
    lines = (line for line in info.read_text().splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").split()[2:])


def level() -> str:
    """The highest level whose instructions this processor has."""
    flags = processor_flags()
    return next(name for name, needs in NEEDS.items() if flags.issuperset(needs))


def load(name: str) -> CpuKernels:
    """The kernels of one level. raises ConfigError where the package wasn't built."""
    try:
        return cast(CpuKernels, importlib.import_module(f"engine.native._cpu_{name}"))
    except ImportError as error:
        raise ConfigError(
            f"the CPU kernels of level {name} aren't built ({error}); run `make setup` or `pip install .`"
        ) from error
