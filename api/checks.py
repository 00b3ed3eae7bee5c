"""Values of a request's fields: every number is finite and in its range, every id is in the vocabulary.

Each check names the field as the client spelt it. What passes here can't end a rank's process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.errors import BadRequest
from engine.messages import MAX_BIASES, MAX_STOP_TOKENS, Sampling

MAX_STOPS = 16
MAX_STOP_CHARS = 256
SEED_RANGE = 1 << 63
MAX_RID_CHARS = 128


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the served model and the settings allow. Sizes in tokens.

    max_group    completions of one HTTP request, which wait together
    temperature, top_p  defaults of the model
    """

    vocab_size: int
    context_length: int
    max_n: int
    max_group: int
    max_top_logprobs: int
    temperature: float
    top_p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Sampling fields of any route, None for a default. `names` maps them to the client's spelling."""

    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[str, float] | None
    seed: int | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    names: Mapping[str, str]

    def name(self, field: str) -> str:
        """The client's spelling of a field."""
        return self.names.get(field, field)


def bad(param: str, why: str, code: str | None = None) -> BadRequest:
    """A refusal that names its field."""
    return BadRequest(f"{param}: {why}", param=param, code=code)


def number(name: str, value: float | None, default: float, low: float, high: float) -> float:
    """The value or its default; BadRequest unless low <= value <= high."""
    if value is None:
        return default
    # Written so that NaN, of which every comparison is false, is refused too.
    if not (low <= value <= high and math.isfinite(value)):
        raise bad(name, f"{value} is not in [{low}, {high}]")
    return value


def integer(name: str, value: int | None, default: int, low: int, high: int) -> int:
    """The value or its default; BadRequest unless low <= value <= high."""
    if value is None:
        return default
    if not low <= value <= high:
        raise bad(name, f"{value} is not in [{low}, {high}]")
    return value


def sampling_of(
    params: Params,
    bounds: Bounds,
    max_new_tokens: int,
    seed: int,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
) -> Sampling:
    """Checked sampling parameters.

    seed  used where the request gives none
    """
    return Sampling(
        max_new_tokens=max_new_tokens,
        min_new_tokens=integer(params.name("min_tokens"), params.min_tokens, 0, 0, max_new_tokens),
        temperature=number(params.name("temperature"), params.temperature, bounds.temperature, 0.0, 2.0),
        top_p=top_p_of(params, bounds),
        top_k=top_k_of(params, bounds),
        min_p=number(params.name("min_p"), params.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=repetition_of(params),
        frequency_penalty=number(params.name("frequency_penalty"), params.frequency_penalty, 0.0, -2.0, 2.0),
        presence_penalty=number(params.name("presence_penalty"), params.presence_penalty, 0.0, -2.0, 2.0),
        logit_bias=biases_of(params, bounds),
        seed=integer(params.name("seed"), params.seed, seed, -SEED_RANGE, SEED_RANGE - 1),
        stop_token_ids=stop_tokens_of(params, bounds),
        ignore_eos=bool(params.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        seeded=params.seed is not None,
    )


def top_p_of(params: Params, bounds: Bounds) -> float:
    """In (0, 1]."""
    value = number(params.name("top_p"), params.top_p, bounds.top_p, 0.0, 1.0)
    if value == 0.0:
        raise bad(params.name("top_p"), "must be above 0")
    return value


def top_k_of(params: Params, bounds: Bounds) -> int:
    """0 for off, which clients write as -1 or 0."""
    return max(0, integer(params.name("top_k"), params.top_k, 0, -1, bounds.vocab_size))


def repetition_of(params: Params) -> float:
    """In (0, 2]."""
    value = number(params.name("repetition_penalty"), params.repetition_penalty, 1.0, 0.0, 2.0)
    if value == 0.0:
        raise bad(params.name("repetition_penalty"), "must be above 0")
    return value


def biases_of(params: Params, bounds: Bounds) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs in order of id; keys are decimal ids in the vocabulary."""
    name = params.name("logit_bias")
    biases = params.logit_bias or {}
    if len(biases) > MAX_BIASES:
        raise bad(name, f"{len(biases)} entries are more than {MAX_BIASES}")
    pairs: dict[int, float] = {}
    for key, value in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9 and int(key) < bounds.vocab_size):
            raise bad(name, f"{key[:20]!r} is not a token id in [0, {bounds.vocab_size})")
        pairs[int(key)] = number(name, value, 0.0, -100.0, 100.0)
    return tuple(sorted(pairs.items()))


def stop_tokens_of(params: Params, bounds: Bounds) -> tuple[int, ...]:
    """Ids in the vocabulary."""
    name = params.name("stop_token_ids")
    ids = params.stop_token_ids or ()
    if len(ids) > MAX_STOP_TOKENS:
        raise bad(name, f"{len(ids)} entries are more than {MAX_STOP_TOKENS}")
    return tuple(integer(name, token, 0, 0, bounds.vocab_size - 1) for token in ids)


def stops_of(name: str, stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings, none empty."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise bad(name, f"{len(stops)} stop strings are more than {MAX_STOPS}")
    for one in stops:
        if not 1 <= len(one) <= MAX_STOP_CHARS:
            raise bad(name, f"a stop string of {len(one)} characters is not in [1, {MAX_STOP_CHARS}]")
    return stops


def ids_in_vocabulary(name: str, ids: Sequence[int], bounds: Bounds) -> None:
    """BadRequest unless there is an id and all are in the vocabulary."""
    if not ids:
        raise bad(name, "the prompt is empty")
    if min(ids) < 0 or max(ids) >= bounds.vocab_size:
        wrong = next(token for token in ids if not 0 <= token < bounds.vocab_size)
        raise bad(name, f"token id {wrong} is not in [0, {bounds.vocab_size})")


def check_group(name: str, completions: int, bounds: Bounds) -> None:
    """BadRequest for a group that would not fit an empty queue: no retry helps it."""
    if completions > bounds.max_group:
        raise bad(
            name, f"{completions} completions are more than the queue of {bounds.max_group} can ever hold"
        )


def new_tokens(name: str, wanted: int | None, default: int, prompt: int, bounds: Bounds, where: str) -> int:
    """How many tokens may be generated; BadRequest where prompt and output don't fit the context.

    default  where the client names no limit; cut to what fits
    where    the field that holds the prompt
    """
    limit = bounds.context_length
    if wanted is not None and wanted < 1:
        raise bad(name, f"{wanted} is less than 1")
    asked = 1 if wanted is None else wanted
    if prompt + asked > limit:
        # OpenAI's wording: clients match on the text.
        raise BadRequest(
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt + asked} "
            f"tokens ({prompt} in the {where}, {asked} in the completion). Please reduce the length of the "
            f"{where} or completion.",
            param=where,
            code="context_length_exceeded",
        )
    return min(default, limit - prompt) if wanted is None else wanted


def rid_of(name: str, value: str | None) -> str:
    """A client's request id, empty for none."""
    if not value:
        return ""
    if len(value) > MAX_RID_CHARS or not value.isprintable() or not value.isascii():
        raise bad(name, f"must be at most {MAX_RID_CHARS} printable ASCII characters")
    return value


def route_of(header: str | None, body: int | None, old_body: int | None) -> int:
    """The demanded rank, -1 for none: the header, then the body's field, then its old name."""
    if header is not None:
        if not (header.isascii() and header.isdigit() and len(header) < 6):
            raise bad("x-data-parallel-rank", f"{header[:20]!r} is not a rank")
        return int(header)
    for name, value in (("routed_dp_rank", body), ("data_parallel_rank", old_body)):
        if value is not None:
            return integer(name, value, -1, 0, 1 << 20)
    return -1
