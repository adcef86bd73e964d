"""Adapter of vLLM: its Prometheus exposition becomes a `Snapshot`. Reads only; vLLM offers no action that frees
KV cache while requests run.

What vLLM cannot say stays None: it counts referenced blocks only, so free and cached are one number (total less
hot), and it tells neither block bytes nor what admitted requests may still ask for. One block of its pool is a
placeholder that is never handed out, so the total is one less than `num_gpu_blocks`.

An exposition with several data-parallel ranks is read as their sum; a full rank beside idle ones is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from ullage_agent.adapters.base import AdapterConfig, Reading
from ullage_agent.adapters.contract import Field, Ledger, Scalar, build_snapshot
from ullage_agent.adapters.transport import EngineHttp, parse_endpoint
from ullage_agent.clock import Clock
from ullage_agent.errors import EngineProtocolError, EngineRefused
from ullage_agent.wire import Action, ActionRequest, ActionResult, EngineIdentity

METRICS_PATH = "/metrics"
PREFIX = "vllm:"
MAX_ANSWER_BYTES = 8 << 20

USAGE = Field(
    attribute="usage",
    source="vllm:kv_cache_usage_perc",
    kind="float",
    high=1.0,  # a ratio, whatever its name says
    aliases=("vllm:gpu_cache_usage_perc",),
)
CONFIG_INFO = "vllm:cache_config_info"
NUM_BLOCKS = Field(attribute="num_gpu_blocks", source=f"{CONFIG_INFO}.num_gpu_blocks", low=2)
BLOCK_SIZE = Field(attribute="block_size", source=f"{CONFIG_INFO}.block_size", low=1)
START_TIME = Field(attribute="start", source="process_start_time_seconds", kind="float", nullable=True)

COUNTS: tuple[Field, ...] = (
    Field(attribute="running", source="vllm:num_requests_running"),
    Field(attribute="waiting", source="vllm:num_requests_waiting"),
    Field(attribute="preemptions_total", source="vllm:num_preemptions_total"),
    Field(attribute="prompt_tokens_total", source="vllm:prompt_tokens_total"),
    Field(attribute="generated_tokens_total", source="vllm:generation_tokens_total"),
    Field(attribute="finished_total", source="vllm:request_success_total"),
    Field(
        attribute="prefix_query_tokens_total",
        source="vllm:prefix_cache_queries_total",
        aliases=("vllm:gpu_prefix_cache_queries_total",),
    ),
    Field(
        attribute="prefix_hit_tokens_total",
        source="vllm:prefix_cache_hits_total",
        aliases=("vllm:gpu_prefix_cache_hits_total",),
    ),
)
"""The metric contract of whole numbers, summed over the label sets of one name."""

_NAMES: frozenset[str] = frozenset(
    (CONFIG_INFO, *(name for promised in (USAGE, START_TIME, *COUNTS) for name in (promised.source, *promised.aliases)))
)


@dataclass(slots=True)
class Exposition:
    """The samples of interest, by name: labels and value of each."""

    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)
    other_names: set[str] = field(default_factory=set)
    """vLLM's names that the contract does not know: where a renamed metric would be found."""


class VllmAdapter:
    """Reads one vLLM server. Implements `EngineAdapter`."""

    def __init__(self, http: EngineHttp, clock: Clock, *, read_timeout_s: float = 2.0) -> None:
        self._http = http
        self._clock = clock
        self._read_timeout_s = read_timeout_s

    @classmethod
    def from_config(cls, config: AdapterConfig) -> VllmAdapter:
        http = EngineHttp(parse_endpoint(config.url), max_bytes=MAX_ANSWER_BYTES)
        return cls(http, config.clock, read_timeout_s=config.read_timeout_s)

    async def read(self) -> Reading:
        sampled_at = self._clock.wall()
        answer = await self._http.get(METRICS_PATH, timeout_s=self._read_timeout_s)
        if answer.status != 200:
            raise EngineRefused(f"GET {METRICS_PATH} answered {answer.status}", status=answer.status)
        return parse_metrics(answer.body, sampled_at)

    async def act(self, action: Action, request: ActionRequest, idempotency_key: str) -> ActionResult:
        return ActionResult(action=action, outcome="Unsupported", message=f"vLLM does not offer {action}")

    def capabilities(self) -> tuple[Action, ...]:
        return ()

    async def close(self) -> None:
        await self._http.close()


def parse_metrics(body: bytes, sampled_at: float) -> Reading:
    """Judge an exposition against the metric contract. Pure.

    Raises:
        EngineProtocolError: it is no Prometheus exposition.
    """
    exposition = parse_exposition(body)
    ledger = Ledger()
    values: dict[str, Scalar | None] = {promised.attribute: _total(exposition, promised, ledger) for promised in COUNTS}
    values |= _blocks(exposition, ledger)
    snapshot = build_snapshot(values, sampled_at=sampled_at, in_flight=None, ledger=ledger)
    return Reading(snapshot=snapshot, identity=_identity(exposition, ledger), violations=ledger.violations)


def parse_exposition(body: bytes) -> Exposition:
    """Read the lines of interest; most of an exposition is histograms, which are skipped unparsed."""
    result = Exposition()
    wanted: list[str] = []
    for line in body.decode(errors="replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _NAMES:
            wanted.append(line)
        elif name.startswith(PREFIX) and not name.endswith(("_bucket", "_created", "_sum", "_count")):
            result.other_names.add(name)
    try:
        for family in text_string_to_metric_families("\n".join(wanted) + "\n"):
            for sample in family.samples:
                result.samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, IndexError, KeyError) as error:
        raise EngineProtocolError(f"{METRICS_PATH}: not a Prometheus exposition ({error})") from error
    return result


def _find(exposition: Exposition, promised: Field, ledger: Ledger) -> list[tuple[dict[str, str], float]]:
    for name in (promised.source, *promised.aliases):
        if name in exposition.samples:
            return exposition.samples[name]
    ledger.absent(promised, exposition.other_names)
    return []


def _total(exposition: Exposition, promised: Field, ledger: Ledger) -> Scalar | None:
    found = _find(exposition, promised, ledger)
    values = [ledger.accept(promised, _whole(value)) for _, value in found]
    numbers = [value for value in values if isinstance(value, int)]
    return sum(numbers) if numbers and len(numbers) == len(values) else None


def _blocks(exposition: Exposition, ledger: Ledger) -> dict[str, Scalar | None]:
    """Pool size and hot blocks. Usage is per rank, so it is weighed by the rank's own pool."""
    usable, block_tokens = _pool(exposition, ledger)
    hot: int | None = 0
    usages = _find(exposition, USAGE, ledger)
    for labels, raw in usages:
        usage = ledger.accept(USAGE, raw)
        size = usable.get(labels.get("engine", ""))
        hot = None if hot is None or usage is None or size is None else hot + round(float(usage) * size)
    return {
        "total_blocks": sum(usable.values()) if usable else None,
        "hot_blocks": hot if usages else None,
        "block_tokens": block_tokens,
    }


def _pool(exposition: Exposition, ledger: Ledger) -> tuple[Mapping[str, int], Scalar | None]:
    """Usable blocks by engine rank, and tokens a block."""
    usable: dict[str, int] = {}
    block_tokens: Scalar | None = None
    infos = exposition.samples.get(CONFIG_INFO, [])
    if not infos:
        ledger.absent(NUM_BLOCKS, exposition.other_names)
    for labels, _ in infos:
        blocks = ledger.accept(NUM_BLOCKS, _digits(labels.get("num_gpu_blocks")))
        block_tokens = ledger.accept(BLOCK_SIZE, _digits(labels.get("block_size")))
        if isinstance(blocks, int):
            usable[labels.get("engine", "")] = blocks - 1
    return usable, block_tokens


def _identity(exposition: Exposition, ledger: Ledger) -> EngineIdentity:
    starts = _find(exposition, START_TIME, ledger)
    start = ledger.accept(START_TIME, starts[0][1]) if starts else None
    models = _labels(exposition.samples.get("vllm:num_requests_running", []), "model_name")
    return EngineIdentity(
        type="vllm",
        instance="unknown" if start is None else f"started-{start:.3f}",
        model=next((model[:256] for model in models), None),
    )


def _labels(samples: Iterable[tuple[dict[str, str], float]], name: str) -> Iterable[str]:
    return (labels[name] for labels, _ in samples if name in labels)


def _whole(value: float) -> int | float:
    """Expositions write counts as floats; one that is no whole number stays a float, to be judged."""
    number = float(value)  # the parser gives whole numbers as int
    return int(number) if number.is_integer() else number


def _digits(text: str | None) -> object:
    return int(text) if text is not None and text.isdecimal() and len(text) < 20 else text
