"""How likely present work and arrivals at the present pace fill the pool, and by when. Pure.

Lengths are learned (`lengths.py`), the pace of arrivals is counted (`arrivals.py`), both are carried forward as a
distribution (`projection.py`) whose first passage of the capacity is told (`passage.py`) and brought to how often that
came true (`calibration.py`).
"""

from __future__ import annotations

from ullage_agent.arrivals import ARRIVALS_S, admissions_held_up, mean_running, steady_arrivals
from ullage_agent.calibration import calibrated
from ullage_agent.forecast import Prospect
from ullage_agent.lengths import MIN_FINISHED, Lengths
from ullage_agent.passage import filled_by
from ullage_agent.projection import Load, project
from ullage_agent.service import Moments, remember, service
from ullage_agent.wire import Snapshot

HORIZON_S = 120.0
ASKED_AT_ONCE = 0.5
"""Of a mean prompt, what room must be left: who comes asks for a whole one, but nobody comes at every moment. Beside a
queue, somebody asks for a whole one now."""


def prospect(state: Snapshot, moments: Moments, lengths: Lengths) -> Prospect | None:
    """Where present work and arrivals lead; None where the engine says too little.

    `state` is the last of `moments`, or a rank of it; arrivals are taken to be spread over ranks evenly.
    """
    recent = service(remember(moments[:-1], moments[-1], ARRIVALS_S))
    tokens, total, hot = state.block_tokens, state.total_blocks, state.hot_blocks
    if recent is None or tokens is None or not total or hot is None or state.running is None:
        return None
    speed, arrivals, busy = recent.generated_tokens_per_s, steady_arrivals(moments), mean_running(moments)
    if not speed or arrivals is None or not busy:
        return None
    share = 1.0 / max(1, len(state.ranks))
    held_up = admissions_held_up(moments)  # such a queue is let in as slowly as it was, whatever room there is
    load = Load(
        held_tokens=float(hot * tokens),
        running=state.running,
        waiting=(state.waiting or 0) if held_up is None else 0,
        tokens_per_s=speed / busy,
        prompt_tokens=lengths.prompt_mean * (1.0 - (recent.prefix_hit_ratio or 0.0)) + tokens / 2,
        prompt_deviation=lengths.prompt_deviation,
    )
    asked = 1.0 if load.waiting else ASKED_AT_ONCE
    rate = share * (arrivals.per_s if held_up is None else held_up)
    spread = project(load, lengths, HORIZON_S).spread(rate, share * arrivals.variance)
    chances = filled_by(spread, total * tokens - asked * load.prompt_tokens)
    wanted = load.held_tokens + load.waiting * load.prompt_tokens
    return Prospect(
        peak_blocks=max(spread.means) / tokens,
        times=tuple(spread.times),
        chances=tuple(calibrated(chance, min(1.0, wanted / (total * tokens))) for chance in chances),
        learned=lengths.count >= MIN_FINISHED,
    )
