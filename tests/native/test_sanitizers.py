"""The exchange's C code alone: a million exchanges and every planted fault, under each sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.exchange.native import new_session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native exchange is Linux's")
NATIVE = Path(__file__).parents[2] / "engine" / "native"
DRIVER = Path(__file__).with_name("exchange_driver.c")
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fno-omit-frame-pointer"]
EXCHANGES = 1_000_000


def compiler() -> str:
    found = shutil.which(os.environ.get("CC", "cc"))
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def build(out: Path, *flags: str) -> Path:
    parts = ("exchange", "exchange_page", "exchange_peer")
    sources = [str(DRIVER), *(str(NATIVE / f"{part}.c") for part in parts)]
    command = [compiler(), *FLAGS, *flags, f"-I{NATIVE}", *sources, "-o", str(out), "-lpthread", "-lrt"]
    subprocess.run(command, check=True)
    return out


def needs_runtime(sanitizers: str, folder: Path) -> None:
    """Skips where a program that does nothing can't be built or run with them."""
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    command = [compiler(), f"-fsanitize={sanitizers}", str(empty), "-o", str(folder / "empty")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    ran = built.returncode == 0 and subprocess.run([folder / "empty"], check=False).returncode == 0
    if not ran:
        pytest.skip(f"the compiler has no runtime for -fsanitize={sanitizers}: {built.stderr.strip()[-200:]}")


# Both ranks spin: without a core for each, an exchange takes as long as a turn of the scheduler.
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_a_million_exchanges_are_right_and_clean(sanitizers: str, tmp_path: Path) -> None:
    needs_runtime(sanitizers, tmp_path)
    driver = build(tmp_path / "driver", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    ran = subprocess.run(
        [driver, new_session(), str(EXCHANGES)], capture_output=True, text=True, check=False, timeout=540
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith(f"{EXCHANGES} exchanges")
    assert "Sanitizer" not in ran.stderr


def test_planted_faults_are_found_without_a_sanitizer_too(tmp_path: Path) -> None:
    ran = subprocess.run([build(tmp_path / "driver", "-O3"), new_session(), "2000"], check=False, timeout=100)
    assert ran.returncode == 0


def test_two_builds_of_unequal_layout_refuse_each_other(tmp_path: Path) -> None:
    old = build(tmp_path / "old", "-DXC_ABI_VERSION=1", "-DONE_RANK")
    new = build(tmp_path / "new", "-DONE_RANK")
    session = new_session()
    ranks = [subprocess.Popen([program, session, str(rank)]) for rank, program in enumerate((old, new))]
    codes = [rank.wait(timeout=100) for rank in ranks]
    # XC_ABI, on both sides.
    assert codes == [1, 1]
