"""POST /generate: the engine's native route, with the shapes that SGLang's clients know."""

from __future__ import annotations

from dataclasses import dataclass

from api.checks import bad, check_group, integer, new_tokens, rid_of, sampling_of, stops_of
from api.completions import prompts_of
from api.exchange import Exchange
from api.gate import Wish
from api.generate_answer import GenerateAnswer, GeneratePlan, Item
from api.intake import (
    Prompt,
    check_ends,
    check_features,
    choose_rid,
    choose_routes,
    count_of,
    entries_of,
    generate_params_of,
    grammar_fields,
)
from api.run import Service, run
from api.schema import GenerateBody, SamplingParams, decode
from engine.messages import Entry

DEFAULT_NEW_TOKENS = 128
PARAMS = "sampling_params."
"""Before a field's name in refusals."""


@dataclass(frozen=True, slots=True)
class Want:
    """One prompt of the body with its parameters and id."""

    prompt: Prompt
    params: SamplingParams
    rid: str
    route: int


async def generate(service: Service, exchange: Exchange) -> None:
    """Answers one prompt or a batch; every refusal of the client's input comes before the first byte."""
    received_s = service.wall_s()
    body = decode(await exchange.body(), GenerateBody)
    check_features(body, service.served)
    prompts, single = await _prompts(service, body)
    routes = choose_routes(exchange, body, len(prompts))
    rids = _rids(service, exchange, body, len(prompts))
    params = _params(body, len(prompts))
    wants = [Want(*parts) for parts in zip(prompts, params, rids, routes, strict=True)]
    entries: list[Entry] = []
    items: list[Item] = []
    wishes: list[Wish | None] = []
    for want in wants:
        wish = await service.gate.wish(grammar_fields(want.params), PARAMS)
        check_ends(want.params, wish, PARAMS)
        made = _entries(service, body, want, received_s)
        entries += made
        items += [Item(want.rid or exchange.rid, want.prompt)] * len(made)
        wishes += [wish] * len(made)
    check_group("text" if body.text is not None else "input_ids", len(entries), service.served.bounds)
    prompt_from = _prompt_from(body, prompts)
    plan = _plan(service, body, items, single and len(entries) == 1, prompt_from, received_s)
    # One rank for all is a promise that they arrive together; several are none.
    route = routes[0] if len(set(routes)) == 1 else -1
    await run(
        service,
        exchange,
        entries,
        route,
        lambda ranks: GenerateAnswer(plan, service.served.tokenizer, ranks),
        bool(body.stream),
        wishes,
    )


async def _prompts(service: Service, body: GenerateBody) -> tuple[list[Prompt], bool]:
    """(prompts, whether the body holds a single one rather than a list)."""
    if (body.text is None) == (body.input_ids is None):
        raise bad("text", "give either text or input_ids")
    served, wall_s = service.served, service.wall_s
    if body.text is not None:
        return await prompts_of("text", body.text, served, wall_s), isinstance(body.text, str)
    ids = body.input_ids or []
    single = all(isinstance(item, int) for item in ids)
    return await prompts_of("input_ids", ids, served, wall_s), single


def _plan(
    service: Service, body: GenerateBody, items: list[Item], single: bool, prompt_from: int, received_s: float
) -> GeneratePlan:
    """What the answer must hold of each item."""
    return GeneratePlan(
        items=tuple(items),
        single=single,
        logprobs=bool(body.return_logprob),
        top=bool(body.return_logprob and body.top_logprobs_num),
        prompt_from=prompt_from,
        texts=bool(body.return_text_in_logprobs),
        drafts=bool(body.return_speculation_stats),
        received_s=received_s,
        wall_s=service.wall_s,
    )


def _rids(service: Service, exchange: Exchange, body: GenerateBody, count: int) -> list[str]:
    """One a prompt; empty where the client chose none."""
    if isinstance(body.rid, list):
        if len(body.rid) != count or len(set(body.rid)) != count:
            raise bad("rid", f"a list must hold {count} different ids, one for each prompt")
        exchange.rid = service.fresh_id("")
        return [rid_of("rid", rid) for rid in body.rid]
    return [choose_rid(exchange, body.rid, lambda: service.fresh_id(""))] * count


def _params(body: GenerateBody, count: int) -> list[SamplingParams]:
    """One a prompt."""
    if isinstance(body.sampling_params, list):
        if len(body.sampling_params) != count:
            raise bad("sampling_params", f"a list must hold {count} objects, one for each prompt")
        return body.sampling_params
    return [body.sampling_params or SamplingParams()] * count


def _entries(service: Service, body: GenerateBody, want: Want, received_s: float) -> list[Entry]:
    """The completions of one prompt, with times of their own."""
    served, params, prompt = service.served, want.params, want.prompt
    check_features(params, served)
    count = count_of("sampling_params.n", params.n, served)
    where = "text" if body.text is not None else "input_ids"
    limit = new_tokens(
        "sampling_params.max_new_tokens",
        params.max_new_tokens,
        DEFAULT_NEW_TOKENS,
        len(prompt.ids),
        served.bounds,
        where,
    )
    top = integer("top_logprobs_num", body.top_logprobs_num, 0, 0, served.bounds.max_top_logprobs)
    logprobs = top if body.return_logprob else -1
    wants_prompt = _prompt_from(body, [prompt]) >= 0
    return entries_of(
        prompt,
        sampling_of(
            generate_params_of(params),
            served.bounds,
            limit,
            service.draw_seed(),
            logprobs,
            logprobs if wants_prompt else -1,
        ),
        count,
        route=want.route,
        rid=want.rid,
        stop=stops_of("sampling_params.stop", params.stop),
        keep_stop=bool(params.no_stop_trim),
        skip_special_tokens=params.skip_special_tokens is not False,
        cache_salt=body.extra_key or "",
        priority=integer("priority", body.priority, 0, -1000, 1000),
        timing=(received_s, prompt.began_s, prompt.done_s, service.wall_s()),
    )


def _prompt_from(body: GenerateBody, prompts: list[Prompt]) -> int:
    """First prompt position whose log probability is wanted; -1 for none."""
    longest = max(len(prompt.ids) for prompt in prompts)
    start = integer("logprob_start_len", body.logprob_start_len, -1, -1, longest)
    return start if body.return_logprob else -1
