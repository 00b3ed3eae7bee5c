"""Soaks of real processes with the trivial rank: an interrupted clean one, and one with planted faults."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.soak.stage import SEEN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STAGE = Path(__file__).with_name("stage.py")
ROOT = STAGE.parents[2]
KINDS = "chat,completion,generate,cancel,bad,stop,seeded,many,batch,long"
"""What a rank without a model can answer."""

WITHIN_S = 250.0


def soaked(model: Path, folder: Path, ranks: int, fault: str = "") -> tuple[int, dict[str, Any], str]:
    """(exit code, report, what was printed); interrupted when it has seen all, or ended by the fault."""
    limits = "--max-running-requests 8 --max-queued-requests 16 --grammar-workers 1 --speculative-algorithm="
    flags = [
        "--minutes", "30", "--model-path", str(model), "--kinds", KINDS,
        "--work-s", "3", "--rest-s", "0.2",
        "--sample-s", "1", "--json", str(folder / "r.json"), "--html", str(folder / "r.html"),
        "--server-flags", f"--dp-size {ranks} {limits}",
    ]  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, STAGE, "soak", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SOAK_FAULT": fault},
    )
    give_up = threading.Timer(WITHIN_S, child.kill)
    give_up.start()
    try:
        assert child.stderr is not None
        told = ""
        while SEEN not in told and (line := child.stderr.readline()):
            told += line
        child.send_signal(signal.SIGINT)
        out, rest = child.communicate()
    finally:
        give_up.cancel()
        child.kill()
    assert (folder / "r.json").exists(), told + rest + out
    return child.returncode, json.loads((folder / "r.json").read_text()), out


def test_a_clean_soak_that_is_interrupted_reports_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    code, report, printed = soaked(model, tmp_path, 2)
    told = report["figures"]
    assert told["violation_list"] == []
    assert (code, told["stopped_early"], told["exit_code"]) == (0, True, 0)
    assert report["name"] == "soak"
    assert {"command", "machine", "commit", "figures"} <= report.keys()
    assert set(KINDS.split(",")) <= told["requests_by_kind"].keys()
    assert told["queue_full"] > 0
    assert told["disconnects"] > 0
    assert set(told["busy_share"]) == {"0", "1"}
    assert {"api", "rank0", "rank1"} <= told["memory_slope_mib_h"].keys()
    assert len(told["samples"]) >= 3
    assert told["rests"] >= 2
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") >= 8
    assert "0 violations" in printed


def test_a_changed_answer_a_leak_and_a_dead_rank_are_reported(model: Path, tmp_path: Path) -> None:
    code, report, printed = soaked(model, tmp_path, 1, str(tmp_path / "die"))
    assert code == 1
    found = [(one["what"], one["evidence"]) for one in report["figures"]["violation_list"]]
    texts = "\n".join(f"{what}: {evidence}" for what, evidence in found)
    assert re.search(r"seeded: the text is .*, it was ", texts)
    assert re.search(r"growth: api: \d+ descriptors, \d+ before: \[.*'/dev/zero'", texts)
    assert re.search(r"processes: rank\d \(\d+\) has ended", texts)
    assert any(what == "end" and "exit code 1" in evidence for what, evidence in found)
    assert "VIOLATION" in printed
