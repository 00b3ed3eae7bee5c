"""Bodies generated from /openapi.json: whatever comes, the answer is a documented one."""

from __future__ import annotations

import anyio
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import checks

from tests.api.stage import says, stage

CHECKS = [
    checks.not_a_server_error,
    checks.CHECKS.get_one("status_code_conformance"),
    checks.CHECKS.get_one("content_type_conformance"),
    checks.CHECKS.get_one("response_schema_conformance"),
]
