"""What detokenizer and rank have to know of an entry that ingress has accepted."""

from __future__ import annotations

from engine.messages import Entry, Submit, Watch


def watch_of(request_id: int, rank: int, entry: Entry) -> Watch:
    """What the detokenizer has to know of an entry."""
    return Watch(
        request_id=request_id,
        sink=entry.sink,
        rank=rank,
        stop=entry.stop,
        keep_stop=entry.keep_stop,
        skip_special_tokens=entry.skip_special_tokens,
    )


def submit_of(request_id: int, route: int, entry: Entry) -> Submit:
    """What a rank has to know of an entry."""
    return Submit(
        request_id=request_id,
        prompt=entry.prompt,
        sampling=entry.sampling,
        route=route,
        child=entry.child,
        grammar_key=entry.grammar_key,
        grammar=entry.grammar,
        grammar_root=entry.grammar_root,
        cache_salt=entry.cache_salt,
        priority=entry.priority,
        deadline_s=entry.deadline_s,
        timing=entry.timing,
    )
