"""How many tokens to draft: as many as are likelier to stand than they cost. Pure arithmetic.

A step of R rows that attend to S cached tokens in all takes F (1 + c R + a S): the weights are read once, and each row
adds its own work. So a token takes F (1 + c R + a S) / R without a draft, and a drafted row over n cached tokens costs
F (c + a n). Drafting pays where the chance that the token stands is above the quotient of both, its *price*: near
nothing for one short sequence, near 1 in a full batch, where rows are all that a step's time consists of. A drafting
pass of a second model, shared by the step's R rows, adds its time. All costs are measured at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

START_RATE = 0.6
"""Chance that a drafted token stands, before anything was seen."""
WEIGHT = 0.1
"""Of one token's fate in the moving average."""
PROBE_AFTER = 24
"""Steps without a draft after which one token is drafted to see whether the text has become predictable."""
PROBE_PRICE = 0.5
"""Above this price nothing is tried out."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Times as shares of F, the time of a step that does not depend on its rows."""

    row: float
    """Of one more row (c above)."""
    cached: float = 0.0
    """Of each cached token that a row attends to (a above)."""
    draft: float = 0.0
    """Of one drafting pass; 0 where drafts come from a table."""

    def price(self, rows: int, attended: float, context: float) -> float:
        """Chance of standing from which a draft pays; may be above 1.

        Args:
            rows: of the step (R above).
            attended: cached tokens that they attend to, in all (S above).
            context: cached tokens of the sequence (n above).
        """
        more = rows * (self.row + self.cached * context) + self.draft
        return more / (1.0 + self.row * rows + self.cached * attended)


@dataclass(slots=True)
class Pace:
    """How well one sequence's drafts have stood, and how many tokens to draft next."""

    rate: float = START_RATE
    """Moving average: chance that a token stands, given that those before it did."""
    idle: int = 0
    """Steps since a draft was last worth its price."""

    def length(self, price: float, longest: int) -> int:
        """Tokens to draft: the k-th stands with rate ** k."""
        count, chance = 0, self.rate
        while count < longest and chance > price:
            count, chance = count + 1, chance * self.rate
        self.idle = 0 if count else self.idle + 1
        if self.idle > PROBE_AFTER and price < PROBE_PRICE:
            self.idle = 0
            return 1
        return count

    def observe(self, drafted: int, accepted: int) -> None:
        """Take the fate of a draft in: `accepted` tokens stood, the next one, if drafted, did not."""
        for _ in range(accepted):
            self.rate += WEIGHT * (1.0 - self.rate)
        if accepted < drafted:
            self.rate -= WEIGHT * self.rate
