"""From the forecast model's chance that the pool fills to how often it then did. Pure.

The model (`projection.py`, `passage.py`) carries learned lengths and the present pace on for ever. What it says of a
pool with much room is worth less than what it says near the brim, where few steps remain in which it can be wrong. Its
odds are therefore weighed with the share of the pool that is held or waited for, before they are read off a curve:

    evidence = ln(chance / (1 - chance)) + WEIGHT * (share - LEVEL)

Weight and curve were fitted to the simulated scenarios 1000 to 1599 (`bench/risk_simulator.py`), which are none of
those that figures are reported of (docs/adr/0008).
"""

from __future__ import annotations

import math

from ullage_agent.curve import Curve, points_on_curve

LEVEL = 0.8
"""Share of the pool at which the model's odds count as they are."""
WEIGHT = 15.0
"""Natural log-odds for a whole pool more or less than that."""
CALIBRATION: Curve = (
    (-14.0, 0.0), (-6.0, 0.15), (-2.0, 0.33), (0.0, 0.48), (2.15, 0.72), (4.5, 0.91), (8.0, 0.99), (12.0, 1.0),
)  # fmt: skip
"""Evidence of exhaustion within half a minute → share of such moments that a shortage followed by then."""
_SURE = 1e-4
"""Chances nearer than this to 0 or 1 are no surer."""


def calibrated(chance: float, share: float) -> float:
    """Chance of exhaustion, from the model's own and the share of the pool that is held or waited for. Rises with both;
    0 and 1 stay."""
    if chance <= 0.0 or chance >= 1.0:
        return chance
    bounded = min(1.0 - _SURE, max(_SURE, chance))
    evidence = math.log(bounded / (1.0 - bounded)) + WEIGHT * (share - LEVEL)
    return points_on_curve(evidence, CALIBRATION)
