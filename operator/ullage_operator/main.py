"""`ullage-operator`: start, lead, stop.

Exit status: 0 after a stop that was asked for, 1 when the lead or the watches are lost, 2 for a bad setting.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
from asyncio import sslproto
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress

import aiohttp
from prometheus_client import CollectorRegistry

from ullage_operator.authority import Authority, Files
from ullage_operator.budget import Budget
from ullage_operator.connect import api_client, require_crds
from ullage_operator.desired import Images
from ullage_operator.discovery import discover
from ullage_operator.election import Elector
from ullage_operator.endpoint import Endpoint, serving
from ullage_operator.errors import ClusterError, SetupError, WatchesLost
from ullage_operator.gather import CONCURRENCY
from ullage_operator.keepers import Keepers
from ullage_operator.kube import Cluster
from ullage_operator.logs import configure
from ullage_operator.metrics import Metrics
from ullage_operator.office import Office
from ullage_operator.pace import Pace
from ullage_operator.server import serve
from ullage_operator.settings import parse
from ullage_operator.watches import Watches

USAGE_STATUS = 2
LOST_STATUS = 1
TLS_BUFFER_BYTES = 4 * 1024
"""Read buffer of one TLS connection: about a report's size, in place of asyncio's 256 KiB for each of thousands."""

COLLECTOR = (20_000, 20, 50)
"""Thresholds of the garbage collector. Hundreds of readings in flight exceed its default of 700 objects all the time,
and nearly all that it would look at is freed without it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT; the process's exit status."""
    try:
        arguments = parse(argv, os.environ)
        configure(arguments.log_level, arguments.log_format)
        _prepare_environment(arguments)
        return asyncio.run(_operate(arguments))
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE_STATUS


async def _operate(arguments: argparse.Namespace) -> int:
    """Put everything together, wait for the lead, and watch until told to stop."""
    async with AsyncExitStack() as stack:
        metrics = Metrics(CollectorRegistry())
        client = await stack.enter_async_context(await api_client(arguments.kubeconfig))
        cluster = Cluster(client, metrics.called)
        await require_crds(cluster)
        office = Office(
            cluster=cluster,
            session=await stack.enter_async_context(_session()),
            features=await discover(cluster),
            images=Images(engine=arguments.engine_image, agent=arguments.agent_image),
            metrics=metrics,
            clock=time.time,
            limiter=asyncio.Semaphore(CONCURRENCY),
            pace=Pace(arguments.sweep_seconds),
            budget=Budget(arguments.max_disruptions),
        )
        run = Run(arguments, office)
        await run.open(stack)
        try:
            status = await run.until_stopped()
        except WatchesLost as error:
            logging.getLogger(__name__).critical("%s", error)
            status = LOST_STATUS
    if run.left:
        logging.shutdown()
        os._exit(status)  # a thread that did not end may hold a lock that the interpreter's own end waits for
    return status


class Run:
    """One process's life as a candidate, a leader, and a server of its ports."""

    def __init__(self, arguments: argparse.Namespace, office: Office) -> None:
        self._arguments = arguments
        self._office = office
        self._keepers = Keepers(office)
        self._watches = Watches(self._keepers, office, arguments.namespace)
        self._stop = asyncio.Event()
        self._facts: dict[str, str] = {}
        self._elector = Elector(
            office.cluster,
            namespace=arguments.operator_namespace,
            name=arguments.lease,
            identity=arguments.identity,
        )

    async def open(self, stack: AsyncExitStack) -> None:
        """Bind the ports. They answer while standing by, too."""
        arguments = self._arguments
        try:
            address = await stack.enter_async_context(
                serve(
                    arguments.http_host,
                    arguments.http_port,
                    registry=self._office.metrics.registry,
                    ready=lambda: self._watches.ready.is_set() or self._standing_by,
                    healthy=lambda: self._keepers.healthy,
                )
            )
        except OSError as error:
            where = f"{arguments.http_host}:{arguments.http_port}"
            raise SetupError(f"--http-port: {where} cannot be bound ({error.strerror}); choose another") from error
        self._facts["http"] = "http://{}:{}".format(*address)
        if arguments.endpoint_port is not None:
            await self._open_endpoint(stack)

    async def until_stopped(self) -> int:
        """Lead once it is this candidate's turn; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        if self._arguments.leader_elect and not await self._or_stop(self._elector.acquire()):
            return 0
        self._office.metrics.leader.set(1)
        try:
            return await self._lead()
        finally:
            self._office.metrics.leader.set(0)
            await self._elector.release()

    @property
    def left(self) -> int:
        """Threads of kopf that were left to themselves."""
        return self._watches.left

    @property
    def _standing_by(self) -> bool:
        return bool(self._arguments.leader_elect) and not self._elector.leading

    async def _lead(self) -> int:
        """Watch until told to stop, or until the lead is lost: then everything ends before another may begin."""
        watch = asyncio.create_task(self._watch(), name="watch")
        tasks = {watch, asyncio.create_task(self._announce(), name="announce")}
        ends = {watch, asyncio.create_task(self._stop.wait(), name="stop")}
        lost = asyncio.create_task(self._elector.hold(), name="lead") if self._arguments.leader_elect else None
        if lost is not None:
            ends.add(lost)
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._keepers.close()
            self._stop.set()
            await asyncio.wait({watch})  # within a bound of its own
            for task in tasks | ends:
                task.cancel()
            await asyncio.gather(*(tasks | ends), return_exceptions=True)
        if watch in done and not watch.cancelled() and (error := watch.exception()):
            raise error
        return LOST_STATUS if lost is not None and lost in done else 0

    async def _watch(self) -> None:
        namespaces = self._arguments.namespace
        if not await self._or_stop(self._keepers.look(namespaces)):
            return
        patrol = asyncio.create_task(self._keepers.patrol(namespaces), name="patrol")
        try:
            await self._watches.run(self._stop)
        finally:
            patrol.cancel()
            await asyncio.gather(patrol, return_exceptions=True)

    async def _open_endpoint(self, stack: AsyncExitStack) -> None:
        arguments, files = self._arguments, None
        if arguments.endpoint_cert is not None:
            files = Files(certificate=arguments.endpoint_cert, key=arguments.endpoint_key)
        authority = Authority(
            cluster=self._office.cluster,
            namespace=arguments.operator_namespace,
            secret=arguments.endpoint_secret,
            dns_name=arguments.endpoint_name,
            webhook=arguments.webhook,
            files=files,
            clock=time.time,
        )
        try:
            await authority.refresh()
        except ClusterError as error:
            raise SetupError(f"--endpoint-secret: {error}; check the operator's rights") from error
        endpoint = Endpoint(
            token=lambda: authority.token,
            tell=self._keepers.tell,
            leading=lambda: self._watches.ready.is_set(),
            clock=time.time,
        )
        host, port = arguments.http_host, arguments.endpoint_port
        try:
            address = await stack.enter_async_context(serving(endpoint, host, port, authority.context))
        except OSError as error:
            where = f"{host}:{port}"
            raise SetupError(f"--endpoint-port: {where} cannot be bound ({error.strerror}); choose another") from error
        keep = asyncio.create_task(authority.keep(), name="authority")
        stack.callback(keep.cancel)
        self._facts["endpoint"] = "https://{}:{}".format(*address)

    async def _announce(self) -> None:
        await self._watches.ready.wait()
        sys.stdout.write(f"ready: {json.dumps(self._facts)}\n")
        sys.stdout.flush()

    async def _or_stop(self, turn: Coroutine[object, object, object]) -> bool:
        """Wait for a turn; False when told to stop before."""
        task = asyncio.create_task(turn)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        came = task.done()
        for each in (task, stop):
            each.cancel()
            with suppress(asyncio.CancelledError):
                await each
        return came


def _session() -> aiohttp.ClientSession:
    """To call agents with. How many are called at once, the office bounds."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)


def _prepare_environment(arguments: argparse.Namespace) -> None:
    # kopf asks for the user's name, which a UID without a passwd entry has only from here; and its login reads the
    # kubeconfig's path from the environment alone.
    os.environ.setdefault("USER", "ullage-operator")
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES  # there is no other setting for it
    gc.set_threshold(*COLLECTOR)
    if arguments.kubeconfig is not None:
        os.environ["KUBECONFIG"] = str(arguments.kubeconfig)


if __name__ == "__main__":
    sys.exit(main())
