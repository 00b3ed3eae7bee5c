"""Lines on standard error: as text, or one JSON object a line, with the request where one is concerned.

A line of the HTTP side has `request_id`, the id that its client knows; a line of a rank has `request`, the
number that the server gave it. The line that says that a request was accepted has both.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

FIELDS = ("request_id", "request", "rank")
"""Of a record's `extra`, what a line shows."""

TEXT = "%(name)s: %(levelname)s: %(message)s"
LOG = logging.getLogger("engine.said")
FORM = {"lines": "text"}
"""What this process was told."""


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What the record says of the request."""
    return {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}


class TextLines(logging.Formatter):
    """`logger: LEVEL: message`, then `name=value` of what else is known."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows it."""
        more = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        return super().formatMessage(record) + more


class JsonLines(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`, what else is known, and `traceback` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message has in it."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, form: str = "text") -> None:
    """Log lines of our own loggers at `level` and above; of libraries, warnings and errors.

    level  debug, info, warning or error
    form   text or json
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level="WARNING", handlers=[handler])
    for name in ("engine", "api"):
        logging.getLogger(name).setLevel(level.upper())
    # What is said to a person is said at every level.
    LOG.setLevel("INFO")
    FORM["lines"] = form


def report_to_stderr(text: str) -> None:
    """Prints a report at once, whatever the buffering; where lines are JSON, as one of them."""
    if FORM["lines"] == "text":
        print(text, file=sys.stderr, flush=True)
    else:
        LOG.info("%s", text)
