"""One reference model and its weights for all golden tests."""

from __future__ import annotations

import pytest

from tests.golden.tiny import reference_model, tiny_config, weights_of


@pytest.fixture(scope="session")
def reference():
    """transformers' tiny model."""
    return reference_model(0)


@pytest.fixture(scope="session")
def weights(reference):
    """Its weights under DeepSeek's names."""
    return weights_of(reference)


@pytest.fixture(scope="session")
def config():
    """The engine's configuration of it."""
    return tiny_config()
