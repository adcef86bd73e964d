"""What a host tier brings to conversations that come back, and what its copies cost.

    python bench/tiers.py [--sessions 10] [--turns 3] [--context 2048] [--pool-share 0.25] [--clients 2]

Sessions take turns, so that each one's blocks have left the pool when it returns. The same conversations run twice in
this process, with a host tier and without one, where what has left is computed anew. Time to first token is compared
over the turns after the first. Copies are compared with numpy copying as many bytes in one piece, in the same process;
`overlap` is the share of the time with copies under way in which the model was computing.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from measure import machine, percentile
from throughput import model_and_text

from ullage_engine.build import LoadedEngine, build_engine
from ullage_engine.config import EngineConfig
from ullage_engine.layout import CacheLayout
from ullage_engine.models import shape_of
from ullage_engine.request import GenerationRequest, SamplingParams, TokenOutput
from ullage_engine.tiers.movers import HostCopies
from ullage_engine.tiers.transfer import Copy, Done, Kind, Mover, ThreadTransfers

Interval = tuple[float, float]
"""Begin and end, seconds."""
MEASURED_BYTES = 256 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both engines and the copies."""
    options = parse(arguments)
    folder, text = model_and_text()
    layout = layout_of(folder, options)
    report: dict[str, Any] = {"machine": machine(), "settings": vars(options)}
    runs = {}
    for name, host in (("recompute", None), ("tiers", 2 * needed_bytes(layout, options))):
        runs[name] = converse(config(folder, layout, options, host), text, options)
        print(row(name, runs[name]), flush=True)
    report |= {name: run.figures() for name, run in runs.items()}
    report["copies"] = copies(layout)
    print("copies: " + ", ".join(f"{name} {value / 2**30:.2f} GiB/s" for name, value in report["copies"].items()))
    same = [a == b for a, b in zip(runs["tiers"].answers(), runs["recompute"].answers(), strict=True)]
    report["same_answers"] = round(sum(same) / len(same), 3)
    print(json.dumps(report | verdict(runs, report["copies"])))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--context", type=int, default=2048, help="tokens of the first prompt")
    parser.add_argument("--turn-tokens", type=int, default=32, help="tokens that each further turn adds")
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--pool-share", type=float, default=0.25, help="of what all sessions need")
    parser.add_argument("--clients", type=int, default=2, help="sessions that are served at the same time")
    parser.add_argument("--kv-type", default="fp8")
    parser.add_argument("--numerics", choices=("fast", "invariant"), default="fast")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    return parser.parse_args(arguments)


def layout_of(folder: Any, options: argparse.Namespace) -> CacheLayout:
    from transformers import AutoConfig

    shape = shape_of(AutoConfig.from_pretrained(folder, local_files_only=True))
    return CacheLayout(shape.layers, shape.kv_heads, shape.head_size, 16, options.kv_type)


def longest(options: argparse.Namespace) -> int:
    """Tokens of a session at its end."""
    tokens: int = options.context + (options.turns - 1) * options.turn_tokens + options.turns * options.output_tokens
    return tokens


def needed_bytes(layout: CacheLayout, options: argparse.Namespace) -> int:
    """Cache that holds all sessions."""
    return int(options.sessions * layout.blocks_for(longest(options)) * layout.block_bytes)


def config(folder: Any, layout: CacheLayout, options: argparse.Namespace, host: int | None) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        kv_type=options.kv_type,
        kv_memory=int(needed_bytes(layout, options) * options.pool_share),
        host_memory=host,
        dtype=options.dtype,
        numerics=options.numerics,
        threads=options.threads,
        max_model_len=longest(options) + 1,
    )


@dataclass(slots=True)
class Turn:
    """One request of a session."""

    session: int
    number: int
    first_token_s: float
    answer: list[int]


@dataclass(slots=True)
class Run:
    """How the conversations went."""

    turns: list[Turn] = field(default_factory=list)
    computing: list[Interval] = field(default_factory=list)
    copying: list[Interval] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    def returning(self) -> list[float]:
        """Times to first token of the turns after the first."""
        return [turn.first_token_s for turn in self.turns if turn.number > 0]

    def answers(self) -> list[list[int]]:
        return [turn.answer for turn in sorted(self.turns, key=lambda turn: (turn.session, turn.number))]

    def figures(self) -> dict[str, Any]:
        times = self.returning()
        return self.counters | {
            "first_turn_ttft_p50_s": round(percentile([t.first_token_s for t in self.turns if t.number == 0], 50), 4),
            "ttft_p50_s": round(percentile(times, 50), 4),
            "ttft_p99_s": round(percentile(times, 99), 4),
            "copying_s": round(total(merged(self.copying)), 4),
        }


def converse(settings: EngineConfig, text: Sequence[int], options: argparse.Namespace) -> Run:
    """All turns of all sessions, `clients` of them at a time, each session's turns in order."""
    engine, run = build_engine(settings), Run()
    try:
        watch(engine, run)
        ask(engine, "warm-up", [1, 2, 3], 4)
        histories = [list(text[i * options.context : (i + 1) * options.context]) for i in range(options.sessions)]
        for number in range(options.turns):
            waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
            for session in range(options.sessions):
                waiting.put(session)
            clients = [
                threading.Thread(target=serve, args=(engine, run, waiting, histories, number, options.output_tokens))
                for _ in range(options.clients)
            ]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            for session, history in enumerate(histories):
                at = (options.sessions + session * options.turns + number) * options.turn_tokens
                history.extend(text[-at - options.turn_tokens : len(text) - at])
        after = engine.core.snapshot()
        run.counters = {"prefix_hit_tokens": after.counters.prefix_hit_tokens}
        if after.host is not None:
            run.counters |= {"host_hit_tokens": after.host.hit_tokens, "failed_copies": after.host.failed_copies}
    finally:
        engine.close()
    if len(run.turns) != options.sessions * options.turns:
        raise RuntimeError(f"{options.sessions * options.turns - len(run.turns)} turns failed")
    return run


def serve(
    engine: LoadedEngine, run: Run, waiting: queue.SimpleQueue[int], histories: list[list[int]], number: int, count: int
) -> None:
    """One client: the next session that waits, until none does."""
    while True:
        try:
            session = waiting.get_nowait()
        except queue.Empty:
            return
        first, answer = ask(engine, f"s{session}t{number}", histories[session], count)
        run.turns.append(Turn(session, number, first, answer))
        histories[session].extend(answer)


def ask(engine: LoadedEngine, name: str, prompt: Sequence[int], count: int) -> tuple[float, list[int]]:
    """Seconds to the first token, and the answer."""
    times: list[float] = []
    answer: list[int] = []
    done = threading.Event()

    def receive(output: TokenOutput) -> None:
        if output.token is not None:
            times.append(time.perf_counter())
            answer.append(output.token)
        if output.finish_reason is not None:
            done.set()

    began = time.perf_counter()
    sampling = SamplingParams(max_tokens=count, temperature=0)
    engine.core.submit(GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=sampling), receive)
    done.wait()
    return times[0] - began, answer


def watch(engine: LoadedEngine, run: Run) -> None:
    """Note when the model computes and when copies are made."""
    core: Any = engine.core
    runner, tiers = core._engine._runner, core._engine._tiers
    runner.forward = timed(runner.forward, run.computing)
    movers: dict[Kind, Mover] = {} if tiers is None else tiers._transfers._movers
    for kind, mover in movers.items():
        movers[kind] = timed(mover, run.copying)


def timed(function: Callable[..., Any], into: list[Interval]) -> Callable[..., Any]:
    """The function, noting when it ran."""

    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            into.append((began, time.perf_counter()))

    return call


def copies(layout: CacheLayout) -> dict[str, float]:
    """Bytes per second of stores and loads of whole blocks, and of one plain copy of as many bytes."""
    count = max(1, MEASURED_BYTES // layout.block_bytes)
    pool = torch.ones((count, layout.block_bytes), dtype=torch.uint8)
    host = np.ones((count, layout.block_bytes), np.uint8)
    movers = HostCopies(pool, host, verify=False).movers()
    transfers = ThreadTransfers(movers)
    order = np.random.default_rng(0).permutation(count).tolist()
    rates: dict[str, float] = {}
    kinds: tuple[Kind, ...] = ("store", "load")
    for kind in kinds:
        some = [Copy(ticket=i, kind=kind, slot=slot, block=i) for i, slot in enumerate(order)]
        rates[kind] = best_rate(lambda some=some: move(transfers, some), host.nbytes)  # type: ignore[misc]
    transfers.close()
    source = pool.numpy()
    rates["memcpy"] = best_rate(lambda: np.copyto(host, source), host.nbytes)
    return rates


def move(transfers: ThreadTransfers, some: list[Copy]) -> None:
    """Make copies and wait for all of them."""
    transfers.submit(some)
    done: list[Done] = []
    while len(done) < len(some):
        transfers.wait(10.0)
        done += transfers.finished()


def best_rate(work: Callable[[], object], size: int, repeats: int = 5) -> float:
    """Bytes per second of the fastest of a few runs: others were disturbed."""
    fastest = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - began)
    return size / fastest


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time, without anything twice."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def total(intervals: Sequence[Interval]) -> float:
    """Seconds of intervals that do not touch."""
    return sum(end - begin for begin, end in intervals)


def overlap(copying: Sequence[Interval], computing: Sequence[Interval]) -> float:
    """Share of the time with copies in which there was computation too; 0.0 without copies."""
    copied, computed = merged(copying), merged(computing)
    both = total(merged([*copied, *computed]))
    return (total(copied) + total(computed) - both) / total(copied) if copied else 0.0


def verdict(runs: dict[str, Run], rates: dict[str, float]) -> dict[str, float]:
    """The three headline figures."""
    times = {name: percentile(run.returning(), 50) for name, run in runs.items()}
    both_ways = 2 / (1 / rates["store"] + 1 / rates["load"])
    return {
        "ratio_ttft": round(times["recompute"] / times["tiers"], 3),
        "ratio_memcpy": round(both_ways / rates["memcpy"], 3),
        "overlap": round(overlap(runs["tiers"].copying, runs["tiers"].computing), 3),
    }


def row(name: str, run: Run) -> str:
    """One line for people."""
    figures = run.figures()
    return (
        f"{name:10} returning turns: TTFT p50 {figures['ttft_p50_s']:.3f} s, p99 {figures['ttft_p99_s']:.3f} s; "
        f"first turns p50 {figures['first_turn_ttft_p50_s']:.3f} s; {figures['prefix_hit_tokens']} tokens reused"
    )


if __name__ == "__main__":
    raise SystemExit(main())
