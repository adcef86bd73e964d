"""Reads agents' plain metrics over HTTP, many at once; one that fails is a text that says why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from .exposition import AgentMetrics, read_agent

TIMEOUT_S = 3.0


async def fetch_agents(urls: Sequence[str]) -> list[AgentMetrics | str]:
    """In the order of the URLs, which may leave `/metrics` out."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        return list(await asyncio.gather(*(_fetch(session, url) for url in urls)))


async def _fetch(session: aiohttp.ClientSession, url: str) -> AgentMetrics | str:
    address = url if url.endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        async with session.get(address) as reply:
            if reply.status != 200:
                return f"{address} answers HTTP {reply.status}"
            return read_agent(await reply.text())
    except TimeoutError:
        return f"{address} does not answer within {TIMEOUT_S:g} s"
    except aiohttp.ClientConnectorError as error:
        return f"{address} cannot be reached ({(error.strerror or str(error)).lower()})"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return f"{address}: {error}"
