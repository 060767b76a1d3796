"""Plants a mistake: the product's rules with one of them changed, and the smallest bounds in which that shows."""

from __future__ import annotations

from typing import NamedTuple

from search.rules import Rules
from search.values import Budgets
from search.world import Bounds, World

OWNER_AND_SETTLER = Bounds((2, 0), 2)
TWO_OWNERS = Bounds((2, 1), 2)


class Mistake(NamedTuple):
    """A mistake, and the smallest bounds in which it shows.

    ``caught`` is False where no bounds that were tried show anything: the reason is in the sentence.
    """

    name: str
    sentence: str
    rules: Rules
    bounds: Bounds
    open_is_fine: bool = False
    caught: bool = True

    def world(self) -> World:
        """The configuration to search."""
        # The ends are those of the product's broker.
        return World(self.bounds, self.rules, open_is_fine=self.open_is_fine, entire=self.rules.handle is not None)


MISTAKES: dict[str, Mistake] = {}


def within(bounds: Bounds, *, open_is_fine: bool = False, caught: bool = True, name: str | None = None):
    """Register a mistake under its class's name; its docstring is the sentence."""

    def register(rules: type[Rules]) -> type[Rules]:
        snake = "".join(f"_{char.lower()}" if char.isupper() else char for char in rules.__name__).lstrip("_")
        named = name or snake
        sentence = " ".join(rules.__doc__.split())
        MISTAKES[named] = Mistake(named, sentence, rules(), bounds, open_is_fine, caught)
        return rules

    return register


def budget(**given: int) -> Budgets:
    """Budgets by name."""
    return Budgets(**given)
