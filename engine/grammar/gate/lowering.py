"""From a schema to EBNF: every goal a rule, what can't be met left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.grammar.gate import scalars
from engine.grammar.gate.alternatives import Alternative, Arr, Bool, Goal, Null, Num, Obj, Str, plainly_empty
from engine.grammar.gate.array_plans import ArrPlan, array_plan
from engine.grammar.gate.ebnf_text import Rules, choice, literal, repeat, sequence, written
from engine.grammar.gate.expansion import Expansion
from engine.grammar.gate.layout import Layout
from engine.grammar.gate.object_plans import Cell, ObjPlan, object_plans
from engine.grammar.gate.plans import Plan, few_values
from engine.grammar.gate.refusals import GrammarRefused

MAX_GOALS = 10_000


class Lowering:
    """One schema on its way to rules. `lower` may be called for several goals that share them."""

    def __init__(self, expansion: Expansion, rules: Rules, layout: Layout, *, open_objects: bool) -> None:
        self.expansion = expansion
        self.rules = rules
        self.layout = layout
        self._open = open_objects
        self._plans: dict[Goal, tuple[Plan, ...]] = {}
        self._possible: set[Goal] = set()
        self._names: dict[Goal, str] = {}

    def lower(self, goal: Goal) -> str:
        """Name of the rule of a goal. Raises GrammarRefused where no value meets it."""
        self.plans(goal)
        todo: list[Goal] = []
        name = self._rule(goal, todo)
        self._write(todo)
        return name

    def plans(self, goal: Goal) -> list[Plan]:
        """What a goal may be, as far as any value can. Raises GrammarRefused where none can."""
        self.prepare(goal)
        if goal not in self._possible:
            raise GrammarRefused("no value meets this schema", _place(goal))
        return [plan for plan in self._plans[goal] if self._can(plan)]

    def possible(self, goal: Goal) -> bool:
        """Whether some value meets a goal that was prepared."""
        return goal in self._possible

    def expression(self, plan: Plan) -> str:
        """EBNF of one alternative; the rules that it needs are made."""
        todo: list[Goal] = []
        text = self._text(plan, todo)
        self._write(todo)
        return text

    def _write(self, todo: list[Goal]) -> None:
        while todo:
            one = todo.pop()
            try:
                self.rules.set(self._names[one], self._body(one, todo))
            except GrammarRefused as error:
                raise error if error.path else GrammarRefused(error.why, _place(one)) from error

    def prepare(self, goal: Goal) -> None:
        """Plan all goals below one, and find those that some finite value meets."""
        todo = [goal]
        while todo:
            one = todo.pop()
            if one in self._plans:
                continue
            if len(self._plans) >= MAX_GOALS:
                raise GrammarRefused(f"more than {MAX_GOALS} combinations of subschemas", _place(goal))
            try:
                union = self.expansion.goal(one)
                self._plans[one] = tuple(plan for part in union for plan in self._laid_out(part))
                children = [list(p.goals()) for p in self._plans[one] if isinstance(p, ArrPlan | ObjPlan)]
            except GrammarRefused as error:
                raise error if error.path else GrammarRefused(error.why, _place(one)) from error
            todo += [child for found in children for child in found]
        self._settle()

    def _laid_out(self, one: Alternative) -> Iterable[Plan]:
        if isinstance(one, Arr):
            return (array_plan(one),)
        if isinstance(one, Obj):
            return object_plans(one, self.expansion, open_objects=self._open)
        return (one,)

    def _settle(self) -> None:
        """Grow the set of goals that can be met until it stays: a value of endless depth is none."""
        waiting = [goal for goal in self._plans if goal not in self._possible]
        while waiting:
            found = [goal for goal in waiting if any(self._can(plan) for plan in self._plans[goal])]
            if not found:
                return
            self._possible |= set(found)
            waiting = [goal for goal in waiting if goal not in self._possible]

    def _can(self, plan: Plan) -> bool:
        if isinstance(plan, ArrPlan | ObjPlan):
            return plan.possible(self._possible.__contains__)
        if isinstance(plan, Num):
            return not plan.conditions or plan.chosen is not None or not plainly_empty(plan)
        return not isinstance(plan, Str) or plan.chosen is not None or not plainly_empty(plan)

    def _rule(self, goal: Goal, todo: list[Goal]) -> str:
        if goal not in self._names:
            self._names[goal] = self.rules.fresh()
            todo.append(goal)
        return self._names[goal]

    def _body(self, goal: Goal, todo: list[Goal]) -> str:
        return choice([self._text(plan, todo) for plan in self.plans(goal)])

    def _text(self, plan: Plan, todo: list[Goal]) -> str:
        if isinstance(plan, Null):
            return '"null"'
        if isinstance(plan, Bool):
            return choice([literal("true" if value else "false") for value in plan.values])
        if isinstance(plan, Num):
            return scalars.number(plan, self.rules)
        if isinstance(plan, Str):
            return scalars.string(plan, self.rules)
        return self._array(plan, todo) if isinstance(plan, ArrPlan) else self._object(plan, todo)

    def _array(self, plan: ArrPlan, todo: list[Goal]) -> str:
        limit = plan.limit(self._possible.__contains__)
        if plan.unique is not None and (limit is None or limit > 1):
            return self._unique(plan, limit)
        if plan.holds:
            return self._counted(plan, todo)
        opens, closes, comma = self._brackets("[", "]")
        if limit == 0:
            return sequence((opens, closes))
        size = len(plan.first) if limit is None else min(len(plan.first), limit)
        tail = ""
        if limit is None or limit > size:
            rest = self._rule(plan.rest, todo)
            least, most = max(0, plan.low - max(size, 1)), None if limit is None else limit - max(size, 1)
            tail = repeat(sequence((comma, rest)), least, most)
            if size == 0:
                tail = sequence((rest, tail))
                return sequence((opens, tail if plan.low else f"({tail})?", closes))
        for place in range(size - 1, -1, -1):
            tail = sequence((comma if place else "", self._rule(plan.first[place], todo), tail))
            tail = tail if place < plan.low else f"({tail})?"
        return sequence((opens, tail, closes))

    def _brackets(self, opens: str, closes: str) -> tuple[str, str, str]:
        layout = self.layout
        before = sequence((literal(opens), layout.after_open))
        return before, sequence((layout.before_close, literal(closes))), layout.comma

    def _counted(self, plan: ArrPlan, todo: list[Goal]) -> str:
        """An array as one rule for each size and count so far."""
        opens, closes, comma = self._brackets("[", "]")
        moves = plan.states(self._possible.__contains__)
        names = {state: self.rules.fresh() for state in moves}
        for state, found in moves.items():
            options = [closes] if plan.accepts(*state) else []
            first = comma if state[0] else ""
            options += [sequence((first, self._rule(goal, todo), names[to])) for goal, to in found]
            self.rules.set(names[state], choice(options))
        return sequence((opens, names[(0, (0,) * len(plan.holds))]))

    def _unique(self, plan: ArrPlan, limit: int | None) -> str:
        """Different items: one rule for each set of values still free."""
        values = few_values(self.expansion.goal(plan.rest))
        if plan.first or plan.holds or values is None:
            why = "is enforced only where items are one of at most 8 constants, or there is at most one item"
            raise GrammarRefused(why, plan.unique or "")
        opens, closes, comma = self._brackets("[", "]")
        texts = [self._text(value, []) for value in values]
        names: dict[frozenset[int], str] = {}
        todo = [frozenset(range(len(texts)))]
        most = len(texts) if limit is None else limit
        if plan.low > min(most, len(texts)):
            raise GrammarRefused(f"{plan.low} different items are more than there are", plan.unique or "")
        names[todo[0]] = self.rules.fresh()
        for free in todo:
            size = len(texts) - len(free)
            options = [closes] if size >= plan.low else []
            for value in sorted(free) if size < most else ():
                after = free - {value}
                if after not in names:
                    names[after] = self.rules.fresh()
                    todo.append(after)
                options.append(sequence((comma if size else "", f"({texts[value]})", names[after])))
            self.rules.set(names[free], choice(options))
        return sequence((opens, names[todo[0]]))

    def _object(self, plan: ObjPlan, todo: list[Goal]) -> str:
        opens, closes, comma = self._brackets("{", "}")

        def member(name: str, goal: Goal, count: int) -> str:
            key = literal(f'"{written(name, "json")}"')
            return sequence((comma if count else "", key, self.layout.colon, self._rule(goal, todo)))

        members = self.members(plan, member, lambda count: self._others(plan, count, todo))
        return sequence((opens, members, closes))

    def members(
        self, plan: ObjPlan, member: Callable[[str, Goal, int], str], others: Callable[[int], str]
    ) -> str:
        """Members in their order: one rule for each listed one and count so far.

        member  EBNF of one by its name and goal, after so many
        others  EBNF of those that aren't listed, after so many
        """
        alive = plan.alive(self._possible.__contains__)
        bodies: dict[tuple[int, int], list[str]] = {}
        names = {(0, 0): self.rules.fresh()}
        order = [(0, 0)]
        for state in order:
            place, count = state
            if place == len(plan.entries):
                bodies[state] = [others(count)]
                continue
            name, goal, required = plan.entries[place]
            may = goal in self._possible and (plan.high is None or count < plan.high)
            ways = [(member(name, goal, count), min(count + 1, plan.cap))] if may else []
            ways += [] if required else [("", count)]
            for part, after in ways:
                if after not in alive[place + 1]:
                    continue
                target = (place + 1, after)
                if target not in names:
                    names[target] = self.rules.fresh()
                    order.append(target)
                bodies.setdefault(state, []).append(sequence((part, names[target])))
        for state in order:
            self.rules.set(names[state], choice(bodies[state]))
        return names[0, 0]

    def _others(self, plan: ObjPlan, count: int, todo: list[Goal]) -> str:
        bounds = plan.last(count, self._possible.__contains__)
        assert bounds is not None
        least, most = bounds
        if most == 0:
            return '""'
        if plan.must:
            must = self._cells(plan.must, todo)
            if not any(goal in self._possible for _, goal in plan.others):
                return sequence((self.layout.comma if count else "", must))
            other = sequence((self._cells(plan.others, todo), self.layout.comma))
            before = repeat(other, 0, None if most is None else most - 1)
            return sequence((self.layout.comma if count else "", before, must))
        member = self._cells(plan.others, todo)
        more = sequence((self.layout.comma, member))
        if count:
            return repeat(more, least, most)
        found = sequence((member, repeat(more, 0, None if most is None else most - 1)))
        return found if least else f"({found})?"

    def _cells(self, cells: Sequence[Cell], todo: list[Goal]) -> str:
        """One member that isn't listed."""
        options = [
            sequence((f"({scalars.string(key, self.rules)})", self.layout.colon, self._rule(goal, todo)))
            for key, goal in cells
            if goal in self._possible
        ]
        return self.rules.shared(choice(options))


def _place(goal: Goal) -> str:
    return next((node.path for node, _ in reversed(goal) if node.path), "/")
