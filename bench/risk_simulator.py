"""A simulated server under simulated traffic, with the moment it runs out of memory as ground truth.

Continuous batching over a paged pool: an engine step prefills and admits within a budget of tokens and lasts as long as
these take, answers decode one token at a time at a pace that falls with the batch, finished requests leave prefix cache
behind, and a sequence that needs a block when none is free or cached preempts the youngest. As in every engine that we
know, a request is refused that would not fit an empty pool. Where blocks lie is followed too (`risk_placement.py`).
Every second one reading comes out, with as much in it as engines of the imitated kind say: `ullage` tells everything,
`sglang` everything but demand, `vllm` hot blocks alone, preemptions late, and nothing new during long steps.

Ground truth is the first preemption after a minute without one, a device without free memory, or a control group at
its limit. Seconds in which the head of the queue waits for blocks, sequences are preempted, or device or group are
full, are a shortage: memory is what is missing then, so a warning in it is not false, though a shortage alone is no
event to foresee. The risk code never sees any of this.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from dataclasses import dataclass, field, replace

from risk_placement import Placement

from ullage_agent.adapters.base import Reading
from ullage_agent.analysis import Surroundings
from ullage_agent.histogram import Histogram
from ullage_agent.wire import Device, EngineIdentity, Host, Snapshot

STEP_S = 0.25
BATCH_TOKENS = {"ullage": 512, "vllm": 2048, "sglang": 2048}
"""Most prompt tokens of one engine step: the engines' defaults for small machines. More is admitted with the next."""
LONG_STEP_S = 1.0
"""vLLM's gauges show the end of the last step; shorter ones are as good as now."""
DURATION_S = 600.0
QUIET_S = 60.0
"""Exhaustion after this long without any is a new event."""
BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
GIB = 1 << 30

FAMILIES = (
    "ramp", "burst", "long-tail", "steady-high", "slow-leak", "neighbour", "stuck", "restart", "gaps",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One reading, None where the scrape was lost."""

    at: float
    reading: Reading | None
    around: Surroundings
    neighbours: int | None = None
    """Longest run of neighbouring blocks that are free or cached: what engines don't tell, for a baseline."""


@dataclass(frozen=True)
class Scenario:
    name: str
    family: str
    flavour: str
    points: tuple[Point, ...]
    events: tuple[float, ...]
    """Seconds at which memory ran out."""
    shortages: tuple[float, ...]
    """Seconds in which blocks were what was missing."""
    duration: float
    stuck_at: float | None = None


@dataclass(eq=False)  # by identity: lists of them are searched
class Request:
    prompt: int
    answer: int
    bound: int
    """max_tokens."""
    shared: int
    """Prompt tokens that lie in blocks of a prefix that others use too."""
    arrived: float
    number: int = 0
    prefill_left: float = 0.0
    ready_at: float = 0.0
    """When the step ends that computes the last of the prompt."""
    done: float = 0.0
    blocks: int = 0
    computed_before: int = 0


@dataclass(frozen=True)
class Traffic:
    """Poisson arrivals at a pace that changes, and log-normal lengths."""

    pace: tuple[tuple[float, float], ...]
    """Corners of arrivals a second over time."""
    prompt: tuple[float, float] = (300.0, 0.6)
    """Median and sigma."""
    answer: tuple[float, float] = (200.0, 0.6)
    shared: int = 0
    bursts: tuple[tuple[float, int], ...] = ()
    """Moment and number of requests that come at once."""
    shift: tuple[float, float] | None = None
    """From this moment, answers are this much longer."""

    def rate(self, at: float) -> float:
        before = self.pace[0]
        for corner in self.pace:
            if at < corner[0]:
                share = (at - before[0]) / (corner[0] - before[0])
                return before[1] + share * (corner[1] - before[1])
            before = corner
        return before[1]


@dataclass
class Engine:
    """State of the simulated server."""

    rng: random.Random
    total: int
    block_tokens: int = 16
    speed: float = 25.0
    """Tokens a second of a sequence that runs alone."""
    knee: float = 60.0
    """Batch at which that has halved."""
    prefill: float = 6000.0
    batch_tokens: int = 2048
    max_running: int = 256
    caching: bool = True
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    cached: int = 0
    frozen: bool = False
    instance: str = "first"
    counters: dict[str, int] = field(default_factory=dict)
    generated: float = 0.0
    answers: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    prompts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    preempted_at: list[float] = field(default_factory=list)
    late_preemptions: int = 0
    short_at: list[float] = field(default_factory=list)
    began_at: float = 0.0
    """When the step in progress began."""
    busy_until: float = 0.0
    placement: Placement | None = None
    arrived: int = 0

    @property
    def longest(self) -> int:
        """Most tokens of one sequence: it must fit a pool that holds nothing else."""
        return (self.total - self.watermark) * self.block_tokens

    @property
    def watermark(self) -> int:
        return math.ceil(self.total * 0.01)

    @property
    def hot(self) -> int:
        shared = max((request.shared for request in self.running), default=0) // self.block_tokens
        return shared + sum(request.blocks for request in self.running)

    @property
    def supply(self) -> int:
        return self.total - self.hot

    def count(self, name: str, amount: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def arrive(self, request: Request) -> None:
        """Queue a request; one that could never be served is refused."""
        if request.prompt < self.longest:
            request.answer = min(request.answer, self.longest - request.prompt)
            self.arrived += 1
            request.number = self.arrived
            self.waiting.append(request)

    def step(self, now: float) -> None:
        """What the engine does in `STEP_S` seconds: a step of prefill and admission if none is in progress, decode."""
        if self.frozen:
            return
        if now >= self.busy_until:
            self.began_at = now
            tokens = self._prefill(now)
            self.busy_until = now + tokens / self.prefill
        self._decode(now)
        self.cached = min(self.cached, self.supply)
        if self.placement is not None:
            self.placement.follow([(request.number, request.blocks) for request in self.running], self.hot)

    def _own_blocks(self, request: Request, tokens: float) -> int:
        return math.ceil(max(0.0, tokens - request.shared) / self.block_tokens)

    def _prefill(self, now: float) -> float:
        """Prompts of those who run, then admission while the budget lasts; tokens computed."""
        budget = left = max(float(self.batch_tokens), self.prefill * STEP_S)  # several short steps count as one
        for request in self.running:
            left -= self._compute(request, left, now + (budget - left) / self.prefill)
        supply = self.supply
        while left > 0 and self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            need = self._own_blocks(request, request.prompt + request.computed_before + 1)
            prefix = 0 if self.running else request.shared // self.block_tokens
            if need + prefix + self.watermark > supply:
                self.short_at.append(now)
                break
            supply -= need + prefix
            self._admit(self.waiting.pop(0), need)
            left -= self._compute(request, left, now + (budget - left) / self.prefill)
        return budget - left

    def _compute(self, request: Request, budget: float, at: float) -> float:
        part = min(budget, request.prefill_left)
        request.prefill_left -= part
        if part:
            request.ready_at = at + part / self.prefill
        return part

    def _admit(self, request: Request, blocks: int) -> None:
        request.blocks = blocks
        request.prefill_left = float(request.prompt - request.shared + request.computed_before)
        request.done = float(request.computed_before)
        self.running.append(request)
        if request.computed_before:
            self.late_preemptions += 1
            self.count("recomputed", request.prompt + request.computed_before)
        else:
            self.count("admitted")
            self.count("prompt", request.prompt)
            self.count("queries", request.prompt)
            self.count("hits", request.shared)

    def _decode(self, now: float) -> None:
        decoding = [request for request in self.running if request.prefill_left <= 0 and now >= request.ready_at]
        pace = self.speed / (1.0 + len(decoding) / self.knee) * STEP_S
        supply = self.supply
        for request in decoding:
            if request not in self.running:
                continue
            gained = min(pace, request.answer - request.done)
            request.done += gained
            self.generated += gained
            if request.done >= request.answer:
                supply += request.blocks
                self._finish(request)
                continue
            need = self._own_blocks(request, request.prompt + request.done + 1) - request.blocks
            while need > supply and len(self.running) > 1:
                supply += self._preempt(now)
                if request not in self.running:
                    need = 0
            request.blocks += need
            supply -= need

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        self.count("finished")
        self.answers[bisect_left(BOUNDS, request.answer)] += 1
        self.prompts[bisect_left(BOUNDS, request.prompt)] += 1
        if self.caching:
            self.cached += request.blocks

    def _preempt(self, now: float) -> int:
        victim = self.running.pop()
        freed, victim.blocks = victim.blocks, 0
        victim.computed_before = max(1, int(victim.done))
        self.waiting.insert(0, victim)
        self.count("preemptions")
        self.preempted_at.append(now)
        return freed


def histogram(counts: list[int]) -> Histogram:
    total, buckets = 0, []
    for bound, count in zip((*BOUNDS, math.inf), counts, strict=True):
        total += count
        buckets.append((float(bound), float(total)))
    return Histogram(tuple(buckets))


def observe(engine: Engine, at: float, flavour: str, number: int) -> Reading:
    """What an engine of this kind would tell."""
    hot, counters = engine.hot, engine.counters
    bt = engine.block_tokens
    state = Snapshot(
        sampled_at=at,
        sequence=number if flavour == "ullage" else None,
        step_age_s=0.1 if flavour == "ullage" and not engine.frozen else None,
        block_tokens=bt,
        total_blocks=engine.total,
        hot_blocks=hot,
        running=len(engine.running),
        waiting=len(engine.waiting),
        finished_total=counters.get("finished", 0),
        preemptions_total=engine.late_preemptions if flavour == "vllm" else counters.get("preemptions", 0),
        prompt_tokens_total=counters.get("prompt", 0),
        generated_tokens_total=int(engine.generated),
        prefix_query_tokens_total=counters.get("queries", 0),
        prefix_hit_tokens_total=counters.get("hits", 0),
    )
    if flavour != "vllm":
        cached = min(engine.cached, engine.total - hot)
        free = engine.total - hot - cached
        state = replace(state, reclaimable_blocks=cached, free_blocks=free)
    if flavour == "ullage":
        state = replace(
            state,
            block_bytes=2 * 32 * 8 * 128 * bt,
            largest_allocation_blocks=free + cached,
            admitted_total=counters.get("admitted", 0),
            recomputed_tokens_total=counters.get("recomputed", 0),
            outstanding_blocks=sum(
                max(0, math.ceil((r.prompt + r.bound - r.shared) / bt) - r.blocks)
                for r in (*engine.running, *engine.waiting)
            ),
        )
        if engine.placement is not None:
            state = replace(state, largest_free_run_blocks=min(free, engine.placement.longest_free_run()))
    histograms = {}
    if flavour != "ullage":
        histograms = {"answer_tokens": histogram(engine.answers), "prompt_tokens": histogram(engine.prompts)}
    identity = EngineIdentity(type=flavour, instance=engine.instance)
    return Reading(snapshot=state, identity=identity, histograms=histograms)


@dataclass
class Plan:
    """What happens in a scenario."""

    traffic: Traffic
    engine: Engine
    flavour: str
    stuck_at: float | None = None
    restart_at: float | None = None
    gaps: tuple[tuple[float, float], ...] = ()
    device_bytes: tuple[tuple[float, float], ...] = ()
    """Corners of used device memory over time, of 80 GiB."""
    host_bytes: tuple[tuple[float, float], ...] = ()
    """Corners of used host memory over time, of 32 GiB."""


def play(name: str, family: str, plan: Plan, duration: float = DURATION_S) -> Scenario:
    """Run a plan second by second."""
    engine, rng = plan.engine, plan.engine.rng
    engine.batch_tokens = BATCH_TOKENS[plan.flavour]
    engine.placement = _placement(engine, plan.flavour, engine.cached)
    points: list[Point] = []
    full: list[float] = []
    seen: Reading | None = None
    bursts = list(plan.traffic.bursts)
    steps = round(1.0 / STEP_S)
    for second in range(round(duration)):
        for part in range(steps):
            now = second + part * STEP_S
            if plan.stuck_at is not None and now >= plan.stuck_at:
                engine.frozen = True
            if plan.restart_at is not None and now >= plan.restart_at and engine.instance == "first":
                engine = replace(
                    engine, running=[], waiting=[], cached=0, instance="second", counters={}, generated=0.0,
                    answers=[0] * (len(BOUNDS) + 1), prompts=[0] * (len(BOUNDS) + 1), late_preemptions=0,
                    busy_until=0.0, placement=_placement(engine, plan.flavour, 0),
                )  # fmt: skip
            for _ in range(_poisson(rng, plan.traffic.rate(now) * STEP_S)):
                engine.arrive(_request(rng, plan.traffic, now))
            while bursts and bursts[0][0] <= now:
                for _ in range(bursts.pop(0)[1]):
                    engine.arrive(_request(rng, plan.traffic, now))
            engine.step(now)
        at = float(second + 1)
        if seen is None or not _in_long_step(engine, plan.flavour, at):
            seen = observe(engine, at, plan.flavour, second)
        lost = any(begin <= at < end for begin, end in plan.gaps)
        around = _around(plan, at, rng)
        run = None if engine.placement is None else engine.placement.longest_available_run()
        points.append(Point(at=at, reading=None if lost else seen, around=around, neighbours=run))
        full.extend([at] if _nothing_left(around) else [])
    onsets = _onsets([*engine.preempted_at, *full[:1]])
    return Scenario(
        name=name, family=family, flavour=plan.flavour, points=tuple(points), events=onsets,
        shortages=tuple(sorted({*engine.short_at, *engine.preempted_at, *full})),
        duration=duration, stuck_at=plan.stuck_at,
    )  # fmt: skip


def _placement(engine: Engine, flavour: str, cached: int) -> Placement | None:
    """Only one kind of engine tells of runs; of the others nobody need know."""
    return Placement(engine.total, cached, caching=engine.caching) if flavour == "ullage" else None


def _in_long_step(engine: Engine, flavour: str, at: float) -> bool:
    return flavour == "vllm" and engine.busy_until > at and engine.busy_until - engine.began_at >= LONG_STEP_S


def _around(plan: Plan, at: float, rng: random.Random) -> Surroundings:
    devices: tuple[Device, ...] = ()
    host = None
    if plan.device_bytes:
        used = _along(plan.device_bytes, at) + rng.uniform(-0.02, 0.02) * GIB
        devices = (Device(index=0, total_bytes=80 * GIB, used_bytes=int(min(80 * GIB, used))),)
    if plan.host_bytes:
        used = _along(plan.host_bytes, at) + rng.uniform(-0.05, 0.05) * GIB
        host = Host(limit_bytes=32 * GIB, used_bytes=int(min(32 * GIB, used)))
    return Surroundings(devices=devices, host=host)


def _nothing_left(around: Surroundings) -> bool:
    """Whether a device or the control group is full."""
    host = around.host
    spent = host is not None and (host.used_bytes or 0) >= (host.limit_bytes or 1)
    return spent or any((device.used_bytes or 0) >= (device.total_bytes or 1) for device in around.devices)


def _onsets(moments: list[float]) -> tuple[float, ...]:
    onsets: list[float] = []
    last = -math.inf
    for moment in sorted(moments):
        if moment - last > QUIET_S:
            onsets.append(moment)
        last = moment
    return tuple(onsets)


def _along(corners: tuple[tuple[float, float], ...], at: float) -> float:
    return Traffic(pace=corners).rate(at)


def _request(rng: random.Random, traffic: Traffic, now: float) -> Request:
    longer = traffic.shift[1] if traffic.shift is not None and now >= traffic.shift[0] else 1.0
    own = max(1, round(rng.lognormvariate(math.log(traffic.prompt[0]), traffic.prompt[1])))
    answer = max(1, round(longer * rng.lognormvariate(math.log(traffic.answer[0]), traffic.answer[1])))
    bound = rng.choice([1024, 2048, 4096])
    return Request(
        prompt=min(own, 8000) + traffic.shared,
        answer=min(answer, bound),
        bound=bound,
        shared=traffic.shared,
        arrived=now,
    )


def _poisson(rng: random.Random, mean: float) -> int:
    count, product, limit = 0, rng.random(), math.exp(-mean)
    while product > limit:
        count += 1
        product *= rng.random()
    return count


def capacity(engine: Engine, traffic: Traffic) -> float:
    """Arrivals a second at which the pool would on average just be full (Little's law)."""
    prompt = traffic.prompt[0] * math.exp(traffic.prompt[1] ** 2 / 2)
    answer = traffic.answer[0] * math.exp(traffic.answer[1] ** 2 / 2)
    second = answer**2 * math.exp(traffic.answer[1] ** 2)
    load = 0.5
    for _ in range(30):  # the pace of decoding depends on the batch, which depends on the pace
        held = prompt + second / (2 * answer) + engine.block_tokens / 2
        batch = (engine.total * engine.block_tokens - traffic.shared) / held
        pace = engine.speed / (1.0 + batch / engine.knee)
        load = batch / (answer / pace)
    return load


def build(number: int) -> Scenario:
    """The scenario of this number: the same every time."""
    rng = random.Random(f"ullage-{number}")
    family = FAMILIES[number % len(FAMILIES)]
    flavour = ("vllm", "ullage", "sglang")[(number // len(FAMILIES)) % 3]
    engine = Engine(
        rng=rng,
        total=rng.choice([256, 512, 1024, 2048]),
        block_tokens=rng.choice([16, 16, 32]),
        speed=rng.uniform(15, 40),
        knee=rng.uniform(30, 120),
        prefill=rng.uniform(3000, 12000),
        caching=rng.random() < 0.8,
    )
    shape = Traffic(
        pace=((0.0, 1.0),),
        prompt=(rng.choice([60.0, 150.0, 300.0]), rng.uniform(0.4, 0.8)),
        answer=(rng.choice([80.0, 150.0, 300.0]), rng.uniform(0.4, 0.8)),
        shared=rng.choice([0, 0, 64, 256]),
    )
    full = capacity(engine, shape)
    plan = _PLANNERS[family](rng, engine, shape, full, flavour)
    return play(f"{family}-{number}", family, plan)


def _ramp(rng: random.Random, engine: Engine, shape: Traffic, full: float, flavour: str) -> Plan:
    begin, rise = rng.uniform(60, 200), rng.uniform(40, 250)
    low, high = rng.uniform(0.2, 0.5), rng.choice([rng.uniform(0.55, 0.78), rng.uniform(1.15, 1.8)])
    pace = ((0.0, low * full), (begin, low * full), (begin + rise, high * full), (DURATION_S, high * full))
    return Plan(replace(shape, pace=pace), engine, flavour)


def _burst(rng: random.Random, engine: Engine, shape: Traffic, full: float, flavour: str) -> Plan:
    low = rng.uniform(0.2, 0.5)
    held = shape.prompt[0] + shape.answer[0]
    fits = (1 - low) * engine.total * engine.block_tokens / held
    bursts = tuple(
        sorted(
            (rng.uniform(90, 520), max(1, round(fits * rng.choice([0.25, 0.4, 1.3, 2.0]))))
            for _ in range(rng.choice([1, 2]))
        )
    )
    return Plan(replace(shape, pace=((0.0, low * full),), bursts=bursts), engine, flavour)


def _long_tail(rng: random.Random, engine: Engine, shape: Traffic, full: float, flavour: str) -> Plan:
    shape = replace(shape, answer=(shape.answer[0] * 0.7, rng.uniform(1.0, 1.4)))
    load = rng.choice([rng.uniform(0.3, 0.6), rng.uniform(0.8, 1.1)])
    shift = (rng.uniform(200, 400), rng.uniform(1.5, 3.0)) if rng.random() < 0.4 else None
    pace = ((0.0, load * capacity(engine, shape)),)
    return Plan(replace(shape, pace=pace, shift=shift), engine, flavour)


def _steady(rng: random.Random, engine: Engine, shape: Traffic, full: float, flavour: str) -> Plan:
    load = rng.uniform(0.6, 0.85)
    engine.caching = True
    engine.cached = engine.total // 2
    return Plan(replace(shape, pace=((0.0, load * full),)), engine, flavour)


def _leak(rng: random.Random, engine: Engine, shape: Traffic, full: float, flavour: str) -> Plan:
    begin, slope = rng.uniform(60, 200), rng.uniform(0.02, 0.15)
    end = 24.0 + slope * (DURATION_S - begin)
    if rng.random() < 0.4:
        end = min(end, rng.uniform(25.0, 28.5))  # it stops by itself
    stop = begin + (end - 24.0) / slope
    host = ((0.0, 24.0 * GIB), (begin, 24.0 * GIB), (stop, end * GIB), (stop + 1e4, end * GIB))
    return Plan(replace(shape, pace=((0.0, 0.4 * full),)), engine, flavour, host_bytes=host)


def _neighbour(rng: random.Random, engine: Engine, shape: Traffic, full: float, flavour: str) -> Plan:
    own, begin = rng.uniform(50, 62), rng.uniform(60, 300)
    takes = rng.choice([rng.uniform(2, 0.75 * (80 - own)), rng.uniform(80 - own, 90 - own) + 1.0])
    takes_s = rng.uniform(20, 200)
    device = (
        (0.0, own * GIB), (begin, own * GIB), (begin + takes_s, (own + takes) * GIB), (1e5, (own + takes) * GIB),
    )  # fmt: skip
    return Plan(replace(shape, pace=((0.0, 0.4 * full),)), engine, flavour, device_bytes=device)


def _stuck(rng: random.Random, engine: Engine, shape: Traffic, full: float, flavour: str) -> Plan:
    pace = ((0.0, rng.uniform(0.3, 0.7) * full),)
    return Plan(replace(shape, pace=pace), engine, flavour, stuck_at=rng.uniform(150, 400))


def _restart(rng: random.Random, engine: Engine, shape: Traffic, full: float, flavour: str) -> Plan:
    plan = _ramp(rng, engine, shape, full, flavour)
    plan.restart_at = rng.uniform(150, 400)
    return plan


def _gaps(rng: random.Random, engine: Engine, shape: Traffic, full: float, flavour: str) -> Plan:
    plan = _ramp(rng, engine, shape, full, flavour)
    begins = [rng.uniform(30, 560) for _ in range(5)]
    plan.gaps = tuple((begin, begin + rng.uniform(3, 25)) for begin in begins)
    return plan


_PLANNERS = {
    "ramp": _ramp, "burst": _burst, "long-tail": _long_tail, "steady-high": _steady, "slow-leak": _leak,
    "neighbour": _neighbour, "stuck": _stuck, "restart": _restart, "gaps": _gaps,
}  # fmt: skip
