"""The C part of the build: the CPU kernels, compiled once for each instruction-set level, and the exchange.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import platform
import sys

from setuptools import Extension, setup

HEADERS = ["vec", "gemm", "norm", "lines", "attend", "compress", "moe", "mask"]
SOURCES = ["module", "gemm", "norm", "attend", "select", "compress", "moe", "mask"]
EXCHANGE = ["exchange", "exchange_page", "exchange_peer", "exchange_module"]
LEVELS = {"x86_64": {"v4": ["-march=x86-64-v4"], "v3": ["-march=x86-64-v3"]}}
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]


def kernels(level: str, flags: list[str]) -> Extension:
    """The extension `engine.native._cpu_LEVEL`; all levels share their sources."""
    return Extension(
        f"engine.native._cpu_{level}",
        [f"engine/native/{name}.c" for name in SOURCES],
        depends=[f"engine/native/{name}.h" for name in HEADERS],
        extra_compile_args=[*FLAGS, *flags, f"-DLEVEL={level}"],
    )


def exchange() -> list[Extension]:
    """The extension `engine.native._exchange`; its page and its sleep are Linux's own."""
    if sys.platform != "linux":
        return []
    return [
        Extension(
            "engine.native._exchange",
            [f"engine/native/{name}.c" for name in EXCHANGE],
            depends=["engine/native/exchange.h"],
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-Wshadow", "-Werror"],
        )
    ]


levels = {"base": [], **LEVELS.get(platform.machine(), {})}
setup(ext_modules=[*(kernels(level, flags) for level, flags in levels.items()), *exchange()])
