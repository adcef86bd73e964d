"""What the agent asks of an engine adapter. One adapter reads one engine; nothing else talks to it.

To add an adapter: write the class beside this file, give it a metric contract (`contract.py`), and enter its
factory in `adapters/__init__.py`. It is tested against hostile answers like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from ullage_agent.clock import Clock
from ullage_agent.histogram import Histogram
from ullage_agent.wire import Action, ActionRequest, ActionResult, EngineIdentity, Snapshot, Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reading of an engine. What broke the metric contract is None in the snapshot and named here."""

    snapshot: Snapshot
    identity: EngineIdentity
    violations: tuple[Violation, ...] = ()
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """Counts since the engine's start, where it offers any: `ttft`, `inter_token`, `end_to_end` (seconds),
    `answer_tokens`, `prompt_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter's factory is given."""

    url: str
    """`unix:PATH`, `http://HOST:PORT`, or for `fake` a file."""
    clock: Clock
    read_timeout_s: float = 2.0
    """Bound on one reading, connecting included."""
    gate_file: Path | None = None
    """State of the admission gate that the engine has loaded; None: it has none."""


class EngineAdapter(Protocol):
    """One engine. All methods run in the agent's event loop and never block it; calls may overlap."""

    async def read(self) -> Reading:
        """Read the engine once. Changes nothing in it; answers within the configured read timeout.

        Raises:
            EngineError: the engine could not be read at all. A single bad value is a violation instead.
        """
        ...

    async def act(self, action: Action, request: ActionRequest, idempotency_key: str) -> ActionResult:
        """Do one action in the engine and say what it really did.

        Mutates the engine's KV cache (evict, compact) or its admission (throttle, release, drain). Repeating
        it with the same key and request is safe where the engine honours keys. An action not in
        `capabilities()` is answered with outcome `Unsupported` and reaches no engine. Unbounded in time: the
        caller bounds it by `request.timeout_s` and may cancel; the engine may then still finish the action.

        Raises:
            EngineError: the engine did not answer, or not understandably; the action may have happened.
            EngineRefused: the engine answered with an error; the action did not happen.
        """
        ...

    def capabilities(self) -> tuple[Action, ...]:
        """Actions the engine was found to offer, as of the last reading. Pure."""
        ...

    async def close(self) -> None:
        """Release connections. Safe to call twice; nothing else may be called after."""
        ...


@runtime_checkable
class HasFeatures(Protocol):
    """An adapter that can say what else its engine offers."""

    def features(self) -> tuple[str, ...]:
        """Names as in `RiskReport.features`, as of the last reading. Pure."""
        ...


@runtime_checkable
class HasCanary(Protocol):
    """An adapter that can have its engine generate one token."""

    async def canary(self, timeout_s: float) -> bool:
        """True: a token came; False: refused, so nothing is known.

        Raises:
            EngineError: no answer within `timeout_s`.
        """
        ...


@runtime_checkable
class HasBlockMap(Protocol):
    """An adapter that can show its engine's pool block by block."""

    async def block_map(self) -> str | None:
        """One letter a block as in `docs/contracts.md`; None where the engine has none.

        Raises:
            EngineError: it could not be read.
        """
        ...


AdapterFactory = Callable[[AdapterConfig], EngineAdapter]
"""Makes an adapter; checks the URL but does not connect.

Raises:
    ConfigError: the URL cannot be one of this adapter's.
"""
