"""The served model, as far as HTTP needs it: its name, tokenizer, chat format and bounds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from api.checks import Bounds
from engine.config import Settings
from engine.errors import ConfigError, UnknownModel
from engine.model.config import ModelConfig
from engine.model.encoding import Encoding, load_encoding
from engine.model.stand_in import text_folder, tokenizer_for
from engine.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Served:
    """One model.

    created  wall-clock seconds at which the server loaded it
    modes    of engine/features.py in which this server runs
    """

    name: str
    tokenizer: Tokenizer
    encoding: Encoding
    bounds: Bounds
    created: int
    modes: frozenset[str]

    def check_name(self, name: str | None) -> None:
        """Raises UnknownModel unless the client left the name out or named this model."""
        if name is not None and name != self.name:
            raise UnknownModel(f"The model `{name}` does not exist; this server has `{self.name}`")


def load_served(settings: Settings, created: int) -> Served:
    """Reads tokenizer, chat format and sizes from the checkpoint folder; no weights. Raises ConfigError."""
    path = Path(settings.model_path)
    config = ModelConfig.from_json(path)
    return Served(
        name=settings.model_name,
        tokenizer=tokenizer_for(settings, config.vocab_size),
        encoding=load_encoding(text_folder(settings, config.vocab_size)),
        bounds=bounds_of(settings, config.vocab_size, config.max_position_embeddings),
        created=created,
        modes=_modes(settings),
    )


def _modes(settings: Settings) -> frozenset[str]:
    """Modes of the features table that these settings mean."""
    modes = {"overlap"}
    if settings.deterministic:
        modes.add("deterministic")
    if settings.speculative_algorithm:
        modes.add("speculation")
    return frozenset(modes)


def bounds_of(settings: Settings, vocab_size: int, positions: int) -> Bounds:
    """Bounds of a model with this vocabulary and this many positions, under the settings."""
    if settings.context_length > positions:
        raise ConfigError(
            f"--context-length is {settings.context_length}, but the model has {positions} positions"
        )
    defaults = generation_defaults(Path(settings.model_path) / "generation_config.json")
    return Bounds(
        vocab_size=vocab_size,
        context_length=settings.context_length or positions,
        max_n=settings.max_n,
        max_group=settings.max_queued_requests,
        max_top_logprobs=min(settings.max_top_logprobs, vocab_size),
        temperature=defaults.get("temperature", 1.0),
        top_p=defaults.get("top_p", 1.0),
    )


def generation_defaults(path: Path) -> dict[str, float]:
    """The numbers of a generation_config.json; empty where the checkpoint has none. Raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {key: float(data[key]) for key in ("temperature", "top_p") if data.get(key) is not None}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
