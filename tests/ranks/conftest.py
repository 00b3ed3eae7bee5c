"""Two ranks as processes, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.workers import Workers


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Two processes that have met."""
    made = Workers(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()
