"""Where each tensor of a checkpoint lies: safetensors headers and the index, under DeepSeek's names.

Only headers are read here. Names that the transformers library writes are translated, stacked experts become
one entry an expert, so that verification and loading know a single layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.model.names import deepseek_name

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# A header is a few hundred bytes a tensor; beyond this a file isn't safetensors at all.
_LARGEST_HEADER = 1 << 28

_STACKED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
# `save_pretrained` writes names that are DeepSeek's but for these.
_HALF_CONVERTED = (
    (re.compile(r"^embed_tokens\."), "embed."),
    (re.compile(r"^hc_head\.hc_"), "hc_head_"),
    (re.compile(r"^(layers\.\d+\.attn)\.norm\."), r"\1.kv_norm."),
)
_ALIASES = (
    (re.compile(r"\.weight_scale_inv$"), ".scale"),
    (re.compile(r"^(mtp\.\d+\.markov_head)\.embed(\.weight)?$"), r"\1.markov_w1.weight"),
    (re.compile(r"^(mtp\.\d+\.markov_head)\.head(\.weight)?$"), r"\1.markov_w2.weight"),
)
# Copies of shared tensors, and buffers that follow from the configuration.
_SKIPPED = re.compile(r"mtp\.\d+\.(embed|emb|head|emb\.tok_emb)\.weight|.*inv_freq")


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor's place: file, the name it has there, its safetensors type and its shape.

    expert  index into the first dimension of a stacked tensor, -1 where the tensor isn't stacked
    rows    first and last row (exclusive) of the expert's matrix that make up the tensor
    """

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    expert: int = -1
    rows: tuple[int, int] = (0, 0)


def find_sources(folder: Path) -> dict[str, Source]:
    """Every tensor of the checkpoint in `folder`, by DeepSeek's name.

    raises  CheckpointError for an unreadable index or file, a file or tensor that the index names and that
            isn't there, or one that is there and that the index doesn't name
    """
    listed = _read_index(folder)
    sources: dict[str, Source] = {}
    for file in sorted(set(listed.values())) if listed else [SINGLE_NAME]:
        header = read_header(folder / file)
        if listed:
            _compare_with_index(file, header, listed)
        for key, entry in header.items():
            for name, source in _translate(folder / file, key, entry):
                if name in sources:
                    raise CheckpointError(f"{name} is in {sources[name].file.name} and again in {file}")
                sources[name] = source
    return sources


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: type, shape and byte range by name.

    raises  CheckpointError where it isn't one, or is shorter than its header says
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LARGEST_HEADER:
                raise CheckpointError(f"{file}: header of {length} bytes, not a safetensors file")
            header = json.loads(stream.read(length))
        size = file.stat().st_size
        header.pop("__metadata__", None)
        ends = {name: 8 + length + int(entry["data_offsets"][1]) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file: {error}") from error
    for name, end in ends.items():
        if end > size:
            raise CheckpointError(f"{file}: {name} ends at byte {end}, the file has {size}")
    entries: dict[str, dict[str, Any]] = header
    return entries


def _read_index(folder: Path) -> dict[str, str]:
    """File by tensor name; empty for a checkpoint of one file. raises CheckpointError."""
    index = folder / INDEX_NAME
    if not index.exists():
        if (folder / SINGLE_NAME).exists():
            return {}
        raise CheckpointError(f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}")
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not a readable index: {error!r}") from error
    if (
        not isinstance(listed, dict)
        or not listed
        or not all(isinstance(file, str) for file in listed.values())
    ):
        raise CheckpointError(f"{index}: weight_map isn't a table of file names")
    return listed


def _compare_with_index(file: str, header: Mapping[str, Any], listed: Mapping[str, str]) -> None:
    wanted = {name for name, place in listed.items() if place == file}
    if missing := sorted(wanted - header.keys()):
        raise CheckpointError(
            f"{file} lacks {missing[0]} ({len(missing)} in all), which {INDEX_NAME} places in it"
        )
    if extra := sorted(header.keys() - wanted):
        raise CheckpointError(
            f"{file} holds {extra[0]} ({len(extra)} in all), which {INDEX_NAME} doesn't place in it"
        )


def _translate(file: Path, key: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, Source]]:
    """The entries that one stored tensor makes, under DeepSeek's names."""
    dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
    stacked = _STACKED.fullmatch(key)
    if stacked and len(shape) == 3:
        for expert in range(shape[0]):
            at = f"layers.{stacked[1]}.ffn.experts.{expert}"
            parts = {"w2": (0, shape[1])}
            if stacked[2] == "gate_up_proj":
                parts = {"w1": (0, shape[1] // 2), "w3": (shape[1] // 2, shape[1])}
            for part, rows in parts.items():
                own = (rows[1] - rows[0], shape[2])
                yield f"{at}.{part}.weight", Source(file, key, dtype, own, expert, rows)
    elif not _SKIPPED.fullmatch(key):
        yield plain_name(key), Source(file, key, dtype, shape)


def plain_name(key: str) -> str:
    """DeepSeek's name of a stored tensor that isn't stacked; unknown names come back as they are."""
    if (name := deepseek_name(key)) is not None:
        return name
    name = key.removeprefix("model.")
    if name != key:
        for pattern, replacement in _HALF_CONVERTED:
            name = pattern.sub(replacement, name)
    for pattern, replacement in _ALIASES:
        name = pattern.sub(replacement, name)
    return name
