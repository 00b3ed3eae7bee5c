"""What an alternative is once it is laid out, and the values of those that have few."""

from __future__ import annotations

from engine.grammar.gate.alternatives import Bool, Null, Num, Str
from engine.grammar.gate.array_plans import ArrPlan
from engine.grammar.gate.object_plans import ObjPlan

MAX_UNIQUE = 8

Plan = Null | Bool | Num | Str | ArrPlan | ObjPlan


def few_values(union: tuple[object, ...]) -> list[Plan] | None:
    """The single values of a union, when they are few and all are scalars."""
    found: list[Plan] = []
    for one in union:
        if isinstance(one, Null):
            found.append(one)
        elif isinstance(one, Bool):
            found += [Bool((value,)) for value in one.values]
        elif isinstance(one, Num) and one.chosen is not None:
            found += [Num((), (number,)) for number in one.chosen]
        elif isinstance(one, Str) and one.chosen is not None:
            found += [Str(chosen=(text,)) for text in one.chosen]
        else:
            return None
    distinct = {_identity(one): one for one in found}
    return list(distinct.values()) if len(distinct) <= MAX_UNIQUE else None


def _identity(one: Plan) -> object:
    return ("number", one.chosen[0].value) if isinstance(one, Num) and one.chosen else one
