"""What all keepers share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from ullage_operator.alerts import AlertBoard
from ullage_operator.book import Book
from ullage_operator.budget import Budget
from ullage_operator.desired import Features, Images
from ullage_operator.gather import SILENT_CONCURRENCY
from ullage_operator.kube import Cluster
from ullage_operator.metrics import Metrics
from ullage_operator.model import Remediation
from ullage_operator.pace import Pace
from ullage_operator.records import read_record
from ullage_operator.stock import Stock
from ullage_operator.targets import KnownPod, known_pod

RECONCILES = 8
"""Services reconciled at once."""


@dataclass(kw_only=True)
class Office:
    """What all keepers share. `session` and `cluster` belong to whoever made them."""

    cluster: Cluster
    session: aiohttp.ClientSession
    images: Images
    features: Features
    metrics: Metrics
    clock: Callable[[], float]
    limiter: asyncio.Semaphore
    """Bounds how many agents are read at once."""
    silent_limiter: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SILENT_CONCURRENCY))
    """The same for agents that did not answer the last time."""
    pace: Pace
    reconciling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(RECONCILES))
    """Bounds how many services are reconciled at once: a start with thousands must not choke the API server."""
    budget: Budget
    pods: Book[KnownPod] = field(default_factory=lambda: Book(known_pod))
    records: Book[Remediation | None] = field(default_factory=lambda: Book(read_record))
    stock: Stock = field(default_factory=lambda: Stock(time.monotonic))
    alerts: AlertBoard = field(default_factory=AlertBoard)
