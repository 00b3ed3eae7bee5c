"""From schemas to alternatives, asked or denied. Denial goes keyword by keyword and is exact, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.grammar.gate import denial
from engine.grammar.gate.alternatives import (
    ANYTHING,
    EVERYTHING,
    Alternative,
    Arr,
    Bool,
    Goal,
    Items,
    Members,
    Null,
    Num,
    Obj,
    Seen,
    Str,
    members_goal,
    plainly_empty,
    without_marks,
)
from engine.grammar.gate.constants import exactly
from engine.grammar.gate.document import Document, Node
from engine.grammar.gate.jsontext import render
from engine.grammar.gate.keywords import (
    arr_of,
    enum_of,
    goal_of,
    map_in,
    num_of,
    obj_of,
    str_of,
    texts_in,
    types_of,
)
from engine.grammar.gate.meeting import meet
from engine.grammar.gate.numbers import Number
from engine.grammar.gate.refusals import GrammarRefused

Union = tuple[Alternative, ...]

REFS = ("$ref", "$dynamicRef", "$recursiveRef")
MAX_ALTERNATIVES = 1_000


class _Busy(GrammarRefused):
    """A schema asks for itself at the same place of the value."""


class Expansion:
    """Unions of one document, each made once."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._done: dict[tuple[Node, bool], Union] = {}
        self._busy: set[tuple[Node, bool]] = set()
        self.spent = 0

    def goal(self, goal: Goal) -> Union:
        """All values that meet every part of a goal."""
        found = EVERYTHING
        if any((node, not wanted) in goal for node, wanted in goal):
            return ()
        for node, wanted in goal:
            found = self.both(found, self.schema(node, wanted), node)
        return found

    def schema(self, node: Node, wanted: bool = True) -> Union:
        """Values that a schema allows, or denies."""
        if isinstance(node.value, bool):
            return EVERYTHING if node.value == wanted else ()
        key = (node, wanted)
        if key not in self._done:
            if key in self._busy:
                raise _Busy("refers to itself without a value between", node.path or "/")
            self._busy.add(key)
            try:
                self._done[key] = self._asked(node) if wanted else denial.denied(self, node)
            finally:
                self._busy.discard(key)
        return self._done[key]

    def both(self, left: Union, right: Union, node: Node) -> Union:
        """Values of both unions. Refuses too many combinations, naming the node."""
        if left == EVERYTHING:
            return right
        if right == EVERYTHING:
            return left
        self.spent += len(left) * len(right)
        if self.spent > 100 * MAX_ALTERNATIVES:
            raise node.refuse("too many combinations of branches in the whole schema")
        found = (meet(one, other) for one in left for other in right)
        return self.either((one for one in found if one is not None), node)

    def either(self, alternatives: Iterable[Alternative], node: Node) -> Union:
        """A union without repeats."""
        union = tuple(dict.fromkeys(alternatives))
        if len(union) > MAX_ALTERNATIVES:
            raise node.refuse(f"more than {MAX_ALTERNATIVES} combinations of branches")
        return union

    def _asked(self, node: Node) -> Union:
        value = node.value
        found = self._typed(node)
        if "const" in value or "enum" in value:
            found = self.both(found, self._listed(node), node)
        for keyword in REFS:
            if keyword in value:
                found = self.both(found, self.schema(self.document.target(node, keyword)), node)
        for child in self.branches(node, "allOf"):
            found = self.both(found, self.schema(child), node)
        if "anyOf" in value:
            options = (one for child in self.branches(node, "anyOf") for one in self.schema(child))
            found = self.both(found, self.either(options, node), node)
        if "oneOf" in value:
            found = self.both(found, self._one_of(node), node)
        if "not" in value:
            found = self.both(found, self.schema(self.document.child(node, "not"), False), node)
        if "if" in value:
            found = self.both(found, self._conditional(node), node)
        for union in self._dependent(node):
            found = self.both(found, union, node)
        return self._unevaluated(node, found)

    def _typed(self, node: Node) -> Union:
        """The alternatives of `type`, with the keywords of each type."""
        found: list[Alternative | None] = []
        for name in types_of(node):
            if name == "null":
                found.append(Null())
            elif name == "boolean":
                found.append(Bool())
            elif name == "string":
                found.append(str_of(node))
            elif name == "array":
                found.append(arr_of(self.document, node))
            elif name == "object":
                found.append(obj_of(self.document, node))
            else:
                found.append(num_of(node, whole=name == "integer"))
        return self.either((one for one in found if one is not None), node)

    def _listed(self, node: Node) -> Union:
        """The values of `const` and `enum`."""
        found = EVERYTHING
        if "const" in node.value:
            found = self._values(node, "const", [node.value["const"]])
        if "enum" in node.value:
            found = self.both(found, self._values(node, "enum", enum_of(self.document, node)), node)
        return found

    def _values(self, node: Node, keyword: str, values: Sequence[Any]) -> Union:
        texts = tuple(dict.fromkeys(one for one in values if isinstance(one, str)))
        lexemes = tuple(dict.fromkeys(one for one in values if isinstance(one, Number)))
        flags = tuple(dict.fromkeys(one for one in values if isinstance(one, bool)))
        found: list[Alternative] = []
        for one in values:
            if isinstance(one, str):
                found.append(Str(chosen=texts))
            elif isinstance(one, Number):
                found.append(Num(chosen=lexemes))
            elif isinstance(one, bool):
                found.append(Bool(flags))
            elif one is None:
                found.append(Null())
            else:
                found += map(without_marks, self.schema(self.constant(node, keyword, one)))
        return self.either(found, node)

    def constant(self, node: Node, keyword: str, value: Any) -> Node:
        """A schema that an array or an object alone meets."""
        return self.document.made(node, f"{keyword} {render(value)}", exactly(value))

    def branches(self, node: Node, keyword: str) -> list[Node]:
        """Subschemas of a list keyword."""
        if keyword not in node.value:
            return []
        found = node.value[keyword]
        if not isinstance(found, list) or not found:
            raise node.refuse("must be a list of schemas", keyword)
        if len(found) > self.document.limits.branches:
            raise node.refuse(f"{len(found)} branches are more than {self.document.limits.branches}", keyword)
        return [self.document.child(node, keyword, i) for i in range(len(found))]

    def _one_of(self, node: Node) -> Union:
        """Branches that are disjoint as they are; of others each without those that it may overlap."""
        branches = self.branches(node, "oneOf")
        unions = [self.schema(branch) for branch in branches]
        found: list[Alternative] = []
        for i, union in enumerate(unions):
            for j, other in enumerate(unions):
                if i == j or self.disjoint(unions[i], other):
                    continue
                try:
                    union = self.both(union, self.schema(branches[j], False), node)
                except GrammarRefused as error:
                    why = f"branches {min(i, j)} and {max(i, j)} may overlap, and one can't be denied"
                    raise node.refuse(f"{why} ({error.why})", "oneOf") from error
            found += union
        return self.either(found, node)

    def disjoint(self, left: Union, right: Union, depth: int = 0) -> bool:
        """Whether it is plain that no value is in both."""
        pairs = (meet(one, other) for one in left for other in right)
        return all(one is None or self.hopeless(one, depth) for one in pairs)

    def hopeless(self, one: Alternative, depth: int = 0) -> bool:
        """Whether it is plain that no value meets an alternative."""
        if isinstance(one, Num | Str):
            return plainly_empty(one)
        if not isinstance(one, Obj) or depth > 3:
            return False
        for name in one.required:
            goal = members_goal(one, name)
            try:
                if all(self.hopeless(inner, depth + 1) for inner in self.goal(goal)):
                    return True
            except GrammarRefused:
                continue  # not known; it will be refused where it is used
        return False

    def _conditional(self, node: Node) -> Union:
        document = self.document
        if "then" not in node.value and "else" not in node.value:
            return EVERYTHING
        test = document.child(node, "if")
        yes, no = self.schema(test), self.schema(test, False)
        if "then" in node.value:
            yes = self.both(yes, self.schema(document.child(node, "then")), node)
        if "else" in node.value:
            no = self.both(no, self.schema(document.child(node, "else")), node)
        return self.either((*yes, *no), node)

    def _dependent(self, node: Node) -> Iterable[Union]:
        """For each name: it is missing, or what it asks for is met."""
        others = tuple(one for one in EVERYTHING if not isinstance(one, Obj))
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, asked in map_in(node, keyword).items():
                if isinstance(asked, list):
                    more: Union = (Obj(required=(name, *texts_in(node, keyword, name))),)
                else:
                    child = self.document.child(node, keyword, name)
                    more = self.both((Obj(required=(name,)),), self.schema(child), node)
                yield self.either((*others, self.lacking(name), *more), node)

    def lacking(self, name: str) -> Obj:
        """Objects without a member of that name."""
        return Obj((Members(names=((name, ((self.document.nothing, True),)),)),))

    def _unevaluated(self, node: Node, union: Union) -> Union:
        """Ask `unevaluated*` of what no keyword of this node, or below it in place, has evaluated."""
        found = union
        for keyword, mark in (
            ("unevaluatedProperties", self._other_members),
            ("unevaluatedItems", self._other_items),
        ):
            if keyword in node.value:
                goal = goal_of(self.document, node, keyword)
                found = self.either((mark(one, goal) for one in found), node)
        return found

    def _other_members(self, one: Alternative, goal: Goal) -> Alternative:
        if not isinstance(one, Obj):
            return one
        if one.seen.everything:
            return one
        names = tuple((name, ANYTHING) for name in sorted(one.seen.names))
        patterns = tuple((tree, ANYTHING) for tree in one.seen.patterns)
        asked = Obj((Members(names, patterns, goal),), seen=Seen(everything=True))
        return meet(one, asked) or one

    def _other_items(self, one: Alternative, goal: Goal) -> Alternative:
        if not isinstance(one, Arr) or one.seen is None:
            return one
        if one.holds and goal:
            raise GrammarRefused("unevaluatedItems beside contains", goal[0][0].path)
        asked = Arr((Items((ANYTHING,) * one.seen, goal),), seen=None)
        return meet(one, asked) or one
