"""The features table: what a request may ask for, and the modes of a server in which it works.

What a server's modes don't support is refused at ingress with its name, never dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.errors import UnsupportedFeature

MODES = frozenset({"overlap", "deterministic", "speculation"})
"""Modes that change how steps are run: one step running and one prepared; row invariance; drafts."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One row of the table.

    works_with  modes under which it works; a server with any other mode refuses it
    why_not     what a client is told where it is in no mode supported
    """

    name: str
    works_with: frozenset[str] = MODES
    why_not: str = ""


def _never(name: str, why_not: str) -> Feature:
    return Feature(name, frozenset(), why_not)


STRUCTURED = (
    "response_format",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Fields by which clients of several servers ask for structured output."""

FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("sampling"),
        Feature("penalties"),
        Feature("logit_bias"),
        Feature("min_tokens"),
        Feature("logprobs"),
        Feature("prompt_logprobs"),
        Feature("stop"),
        Feature("seed"),
        Feature("n"),
        Feature("echo"),
        Feature("stream"),
        Feature("tools"),
        Feature("thinking"),
        Feature("return_speculation_stats"),
        *(Feature(name) for name in STRUCTURED),
        _never("stop_regex", "use stop or stop_token_ids"),
        _never("allowed_token_ids", "use logit_bias"),
        _never("bad_words", "use logit_bias"),
        _never("use_beam_search", "use n"),
        _never("custom_logit_processor", "use logit_bias"),
        Feature("tool_choice"),
        _never("functions", "use tools"),
        _never("function_call", "use tool_choice"),
        _never("audio", "the model has no audio"),
        _never("modalities", "the model has text alone"),
        _never("web_search_options", "the server does not search"),
        _never("continue_final_message", "use /v1/completions for a raw prompt"),
        _never("image_data", "the model has no images"),
        _never("suffix", "the model does not fill in the middle"),
        _never("best_of", "use n"),
        _never("input_embeds", "prompts are text or token ids"),
        _never("token_ids_logprob", "use top_logprobs_num"),
        _never("lora_path", "adapters are not served"),
        _never("session_params", "sessions are not served"),
        _never("bootstrap_host", "prefill and decode run in one server"),
        _never("bootstrap_port", "prefill and decode run in one server"),
        _never("bootstrap_room", "prefill and decode run in one server"),
    )
}


ASKED_BY = {
    "temperature": "sampling",
    "top_p": "sampling",
    "top_k": "sampling",
    "min_p": "sampling",
    "frequency_penalty": "penalties",
    "presence_penalty": "penalties",
    "repetition_penalty": "penalties",
    "min_new_tokens": "min_tokens",
    "top_logprobs": "logprobs",
    "return_logprob": "logprobs",
    "top_logprobs_num": "logprobs",
    "logprob_start_len": "prompt_logprobs",
    "stop_token_ids": "stop",
    "sampling_seed": "seed",
    "chat_template_kwargs": "thinking",
}
"""Field of a request body -> the feature that it asks for, where that has another name."""


def feature_of(field: str) -> str | None:
    """The feature that a set field asks for; None for a field that asks for none."""
    return ASKED_BY.get(field, field if field in FEATURES else None)


def refuse_unsupported(wanted: Iterable[str], modes: Collection[str]) -> None:
    """Raises UnsupportedFeature for the first wanted feature that one of the server's modes doesn't support.

    wanted  names in FEATURES
    modes   of the running server, out of MODES
    """
    for name in wanted:
        feature = FEATURES[name]
        if feature.why_not:
            raise UnsupportedFeature(
                f"{name} is not supported: {feature.why_not}", name, "unsupported_feature"
            )
        clash = sorted(set(modes) - feature.works_with)
        if clash:
            raise UnsupportedFeature(
                f"{name} does not work with {', '.join(clash)} on this server", name, "unsupported_feature"
            )
