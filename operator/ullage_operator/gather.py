"""Read agents and call their actions over TLS. This module speaks HTTP and decides nothing."""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import lru_cache

import aiohttp
from yarl import URL

from ullage_agent.wire import Action, ActionRequest, ActionResult, RiskReport, WireError, decode, encode
from ullage_operator.errors import AgentError, AgentRefused, AgentUnreachable
from ullage_operator.observation import AgentTarget, Observation

READ_TIMEOUT_S = 2.0
"""Bound on reading one agent, connecting included."""
ANSWER_MARGIN_S = 3.0
"""Added to an action's own bound before its answer counts as lost."""
CONCURRENCY = 64
"""Agents read at once by one `gather`, where the caller brings no limiter of its own."""
SILENT_CONCURRENCY = 256
"""Agents that did not answer the last time and are tried at once: each may hold its place for the whole timeout."""
MAX_ANSWER_BYTES = 1024 * 1024
"""Longest answer that is read: a misbehaving peer must not fill our memory."""


@dataclass(frozen=True, slots=True)
class AgentClient:
    """Calls agents that share one token and one trusted certificate. Stateless; the session is the caller's."""

    session: aiohttp.ClientSession
    token: str
    ssl: ssl_module.SSLContext

    async def risk(self, target: AgentTarget) -> RiskReport:
        """The agent's report.

        Raises:
            AgentRefused: it answered with an error.
            AgentUnreachable: no answer in time, or one that cannot be read.
        """
        body = await self._call("GET", target, "/v1/risk", timeout_s=READ_TIMEOUT_S)
        try:
            return decode(body, RiskReport)
        except WireError as error:
            raise AgentUnreachable(f"answered with an unreadable report: {error}") from error

    async def act(self, target: AgentTarget, action: Action, request: ActionRequest, *, key: str) -> ActionResult:
        """Carry out an action; the same `key` never acts twice.

        Raises:
            AgentRefused: the agent did nothing.
            AgentUnreachable: it is not known what was done; call again with the same key.
        """
        timeout_s = request.timeout_s + ANSWER_MARGIN_S
        path = f"/v1/actions/{action}"
        body = await self._call("POST", target, path, timeout_s=timeout_s, data=encode(request), key=key)
        try:
            return decode(body, ActionResult)
        except WireError as error:
            raise AgentUnreachable(f"answered with an unreadable result: {error}") from error

    async def _call(
        self,
        method: str,
        target: AgentTarget,
        path: str,
        *,
        timeout_s: float,
        data: bytes | None = None,
        key: str = "",
    ) -> bytes:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        if key:
            headers["Idempotency-Key"] = key
        try:
            async with self.session.request(
                method,
                _url(target.url, path),
                data=data,
                headers=headers,
                ssl=self.ssl,
                server_hostname=target.server_name,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                body = await _read(response)
        except TimeoutError as error:
            raise AgentUnreachable(f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise AgentUnreachable(f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            return body
        detail = f"HTTP {response.status}: {body[:200].decode(errors='replace')}"
        if response.status >= 500 and method == "POST":
            raise AgentUnreachable(detail)
        raise AgentRefused(detail, status=response.status)


@lru_cache(maxsize=16_384)
def _url(base: str, path: str) -> URL:
    """Taken apart once: it is called again every two seconds."""
    return URL(base + path)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(64 * 1024):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise AgentUnreachable(f"answered with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


async def gather(
    agents: AgentClient,
    targets: Sequence[AgentTarget],
    *,
    clock: Callable[[], float],
    limiter: asyncio.Semaphore | None = None,
    silent: Container[str] = (),
    silent_limiter: asyncio.Semaphore | None = None,
) -> tuple[Observation, ...]:
    """Read all targets at once, at most as many as `limiter` lets through, each bounded in time.

    One observation a target, in their order; a failing agent is an observation with an error, no exception. Those
    whose UID is in `silent` did not answer the last time: they wait for `silent_limiter` instead, so that many dead
    agents do not hold up the readings of all others.
    """
    gate = limiter or asyncio.Semaphore(CONCURRENCY)

    async def observe(target: AgentTarget) -> Observation:
        async with (silent_limiter or gate) if target.uid in silent else gate:
            try:
                report = await agents.risk(target)
            except AgentError as error:
                return Observation(target=target, received_at=clock(), error=str(error))
            return Observation(target=target, received_at=clock(), report=report)

    return tuple(await asyncio.gather(*(observe(target) for target in targets)))
