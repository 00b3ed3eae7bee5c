"""A dummy of nothing but a config.json is served with the shipped tokenizer; a checkpoint needs its own."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.served import load_served
from bench.serve import server
from engine.config import NANO, Settings
from engine.errors import ConfigError
from engine.grammar.model_vocabulary import model_vocabulary
from engine.grammar.tokenizer_info import Vocabulary
from engine.model.stand_in import stands_in, text_folder, told_of_stand_in
from engine.model.tokenizer import load_tokenizer

SHIPPED, WIDTH = 8192, 9000
SMALL: dict[str, Any] = {
    "num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0], "hidden_size": 64,
    "dspark_target_layer_ids": [2, 3, 4], "dspark_markov_rank": 16, "moe_intermediate_size": 32,
    "num_attention_heads": 2, "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 32, "o_groups": 1,
    "o_lora_rank": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "index_n_heads": 2,
    "index_head_dim": 32, "index_topk": 16, "dspark_noise_token_id": 2,
}  # fmt: skip
"""The release's geometry, narrow and with few layers of every ratio."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


def flash(folder: Path, vocab_size: int) -> Settings:
    real = json.loads((NANO.parent / "flash" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(real | SMALL | {"vocab_size": vocab_size}))
    return Settings(model_path=str(folder), load_format="dummy")


def test_the_shipped_tokenizer_stands_in_where_a_dummy_has_none(tmp_path: Path) -> None:
    settings = flash(tmp_path, WIDTH)
    served, shipped = load_served(settings, 0), load_tokenizer(NANO)
    ids = shipped.encode("Once upon a time")
    assert served.tokenizer.encode_plain("Once upon a time") == ids
    assert served.tokenizer.decode([*ids, SHIPPED, WIDTH - 1, WIDTH]) == "Once upon a time\ufffd\ufffd"
    assert "ids from 8192 to 8999 read as U+FFFD" in told_of_stand_in(settings, WIDTH)


def test_api_and_rank_have_one_vocabulary_and_no_grammar_allows_an_id_that_is_no_text(
    tmp_path: Path,
) -> None:
    settings = flash(tmp_path, WIDTH)
    text = text_folder(settings, WIDTH)

    def of(tokenizer: Any, stop: int) -> Vocabulary:
        return model_vocabulary(text, tokenizer, WIDTH, [stop])

    for stop in (1, WIDTH - 1):
        api, rank = of(load_served(settings, 0).tokenizer, stop), of(load_tokenizer(text), stop)
        assert api.digest == rank.digest
        assert not any(api.tokens[SHIPPED:])


@pytest.mark.parametrize("given", [{"load_format": "auto"}, {"vocab_size": SHIPPED - 1}])
def test_nothing_stands_in_for_a_checkpoint_or_where_ids_would_be_too_large(
    given: dict[str, Any], tmp_path: Path
) -> None:
    settings = flash(tmp_path, given.get("vocab_size", WIDTH))
    settings = Settings(model_path=settings.model_path, load_format=given.get("load_format", "dummy"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json can't be read") as raised:
        load_served(settings, 0)
    assert ("of 8192 tokens, can't stand in for a dummy's of 8191" in str(raised.value)) == (
        "vocab_size" in given
    )


def test_a_tokenizer_of_its_own_is_taken(tmp_path: Path) -> None:
    settings = flash(tmp_path, WIDTH)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not stands_in(settings, WIDTH)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer") as raised:
        load_served(settings, 0)
    assert "stand in" not in str(raised.value)


@pytest.mark.slow
def test_a_config_alone_answers_chats_completions_and_schemas_over_http(tmp_path: Path) -> None:
    folder = tmp_path / "flash"
    folder.mkdir()
    flash(folder, WIDTH)
    flags = ["--model", str(folder), "--load-format", "dummy", "--max-total-tokens", "8192", "--threads", "1"]
    flags += ["--context-length", "4096", "--max-running-requests", "4"]
    hello = [{"role": "user", "content": "Hello"}]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    beyond = {"prompt": "Once upon", "max_tokens": 8, "ignore_eos": True, "logit_bias": {f"{SHIPPED}": 100}}
    bodies: dict[str, dict[str, Any]] = {
        "completions": beyond,
        "chat/completions": {"messages": hello, "max_tokens": 64, "response_format": schema},
    }
    with server(flags) as (port, child):
        url = f"http://127.0.0.1:{port}/v1/"
        found = {path: httpx.post(url + path, json=body, timeout=60) for path, body in bodies.items()}
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    assert all(answer.status_code == 200 for answer in found.values()), found
    completion, chat = (answer.json() for answer in found.values())
    assert completion["usage"]["completion_tokens"] == 8
    assert "\ufffd" in completion["choices"][0]["text"]
    assert json.loads(chat["choices"][0]["message"]["content"])["a"] in (True, False)
