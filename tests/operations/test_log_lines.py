"""Lines of a server, as text and as JSON, with the request that they are about."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from engine.log_lines import JsonLines, TextLines
from engine.messages import FAILED, RequestFailed
from engine.rank_figures import RankFigures
from tests.api.stage import says, stage

SAYS = """
import logging
from engine.log_lines import log_to_stderr, report_to_stderr
log_to_stderr("info", FORM)
report_to_stderr("api: up\\nand running")
logging.getLogger("api").debug("too quiet")
logging.getLogger("other").info("of a library")
logging.getLogger("api").info("said", extra={"request_id": "a", "request": 7})
try:
    raise ValueError("bad")
except ValueError:
    logging.getLogger("engine.rank").exception("broken")
"""


def said(form: str) -> list[str]:
    run = [sys.executable, "-c", SAYS.replace("FORM", repr(form))]
    return subprocess.run(run, capture_output=True, text=True, check=True).stderr.splitlines()


def test_json_has_one_object_a_line_whatever_is_said() -> None:
    up, line, broken = map(json.loads, said("json"))
    assert (up["message"], up["level"], up["logger"]) == ("api: up\nand running", "info", "engine.said")
    assert (line["message"], line["request_id"], line["request"]) == ("said", "a", 7)
    assert broken["level"] == "error"
    assert "ValueError: bad" in broken["traceback"]
    assert all(one["time"].endswith("+00:00") for one in (up, line, broken))


def test_text_is_for_people() -> None:
    lines = said("text")
    assert lines[:3] == ["api: up", "and running", "api: INFO: said request_id=a request=7"]
    assert lines[3] == "engine.rank: ERROR: broken"
    assert lines[-1] == "ValueError: bad"


@pytest.mark.parametrize("form", [TextLines(), JsonLines()])
def test_a_rank_names_the_request_that_failed_by_its_fault(
    form: logging.Formatter, caplog: pytest.LogCaptureFixture
) -> None:
    figures = RankFigures(0)
    with caplog.at_level("INFO", "engine.rank"):
        figures.stages.sent(RequestFailed(41, FAILED, 503, "the server is stopping"))
        figures.stages.sent(RequestFailed(42, FAILED, 500, "not a number"))
    (record,) = caplog.records
    line = form.format(record)
    assert "ended: not a number" in line
    assert "42" in line


@pytest.mark.anyio
async def test_lines_of_a_request_have_the_id_that_its_client_gave(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "api"):
        async with stage(says("Hi")) as made, made.client() as client:
            body = {"messages": [{"role": "user", "content": "x"}]}
            await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
    accepted, answered = [record for record in caplog.records if record.name == "api"]
    assert (accepted.getMessage(), accepted.__dict__["request_id"]) == ("accepted", "mine")
    assert accepted.__dict__["rank"] == 0
    assert answered.__dict__["request_id"] == "mine"
    assert "/v1/chat/completions: 200 after" in answered.getMessage()
