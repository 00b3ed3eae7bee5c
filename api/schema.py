"""Request bodies. Types are checked on decoding, values in checks.py; unknown fields are ignored.

A field of type Any is either read with its own checks, or known to be unsupported: then the features table
refuses it by name.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from engine.errors import BadRequest

Body = TypeVar("Body")


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Wishes(msgspec.Struct, kw_only=True):
    """What the OpenAI routes have in common. None is the default everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    rid: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_speculation_stats: bool | None = None
    response_format: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    stop_regex: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    use_beam_search: Any = None
    custom_logit_processor: Any = None
    lora_path: Any = None
    session_params: Any = None
    bootstrap_room: Any = None


class ChatBody(Wishes, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    continue_final_message: Any = None


class CompletionBody(Wishes, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = None
    best_of: Any = None


class SamplingParams(msgspec.Struct, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    stop_regex: Any = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /generate."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    routed_dp_rank: int | list[int | None] | None = None
    data_parallel_rank: int | None = None
    extra_key: str | None = None
    priority: int | None = None
    return_speculation_stats: bool | None = None
    token_ids_logprob: Any = None
    input_embeds: Any = None
    image_data: Any = None
    custom_logit_processor: Any = None
    session_params: Any = None
    lora_path: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None


_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`\Z")


def decode(raw: bytes, kind: type[Body]) -> Body:
    """The body as `kind`. Raises BadRequest that names the field where it is known."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        found = _PATH.search(str(error))
        missing = re.match(r"Object missing required field `(\w+)`", str(error))
        param = missing.group(1) if missing else found.group("path") if found else None
        text = str(error)[: found.start()] if found else str(error)
        raise BadRequest(f"{param}: {text}" if param else text, param=param or None) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
