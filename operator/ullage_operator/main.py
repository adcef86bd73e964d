"""`ullage-operator`: command line, wiring, exit status. 0 after a stop that was asked for, 2 for a bad setting."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import aiohttp
import kopf
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config
from prometheus_client import CollectorRegistry

from ullage_operator.budget import Budget
from ullage_operator.desired import Images
from ullage_operator.discovery import discover
from ullage_operator.errors import ClusterError, SetupError
from ullage_operator.gather import CONCURRENCY
from ullage_operator.handlers import register, settings
from ullage_operator.keeper import Office
from ullage_operator.keepers import Keepers
from ullage_operator.kube import Cluster
from ullage_operator.metrics import Metrics
from ullage_operator.model import API_VERSION
from ullage_operator.server import serve

USAGE_STATUS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT; the process's exit status."""
    try:
        arguments = _parser(os.environ).parse_args(argv)
        logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
        if arguments.log_level != "debug":
            logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # a line for every event of every object
        _prepare_environment(arguments)
        asyncio.run(_operate(arguments))
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE_STATUS
    return 0


async def _operate(arguments: argparse.Namespace) -> None:
    """Put everything together and watch until told to stop."""
    async with AsyncExitStack() as stack:
        cluster = Cluster(await stack.enter_async_context(await _api_client(arguments.kubeconfig)))
        await _require_crds(cluster)
        registry = CollectorRegistry()
        office = Office(
            cluster=cluster,
            session=await stack.enter_async_context(aiohttp.ClientSession(trust_env=False)),
            features=await discover(cluster),
            images=Images(engine=arguments.engine_image, agent=arguments.agent_image),
            metrics=Metrics(registry),
            clock=time.time,
            limiter=asyncio.Semaphore(CONCURRENCY),
            sweep_seconds=arguments.sweep_seconds,
            budget=Budget(arguments.max_disruptions),
        )
        watching = asyncio.Event()
        try:
            address = await stack.enter_async_context(
                serve(arguments.http_host, arguments.http_port, registry=registry, ready=watching.is_set)
            )
        except OSError as error:
            where = f"{arguments.http_host}:{arguments.http_port}"
            raise SetupError(f"--http-port: {where} cannot be bound ({error.strerror}); choose another") from error
        announcement = asyncio.create_task(_announce(watching, address))
        stack.callback(announcement.cancel)
        await _watch(office, arguments.namespace, watching)


async def _watch(office: Office, namespaces: Sequence[str], watching: asyncio.Event) -> None:
    registry, keepers, options = kopf.OperatorRegistry(), Keepers(office), settings()
    options.scanning.disabled = bool(namespaces)  # then no rights beyond those namespaces are needed
    register(registry, keepers, office)
    patrol = asyncio.create_task(keepers.patrol(namespaces), name="patrol")
    try:
        await kopf.operator(
            registry=registry,
            settings=options,
            standalone=True,
            clusterwide=not namespaces,
            namespaces=tuple(namespaces),
            ready_flag=watching,
        )
    finally:
        patrol.cancel()
        await keepers.close()


async def _announce(watching: asyncio.Event, address: tuple[str, int]) -> None:
    await watching.wait()
    host, port = address
    sys.stdout.write(f"ready: {json.dumps({'http': f'http://{host}:{port}'})}\n")
    sys.stdout.flush()


async def _api_client(kubeconfig: Path | None) -> ApiClient:
    configuration = Configuration()
    try:
        if kubeconfig is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            file = str(kubeconfig) if kubeconfig else None
            load = load_kube_config(config_file=file, client_configuration=configuration)  # type: ignore[no-untyped-call]
            await load
    except (ConfigException, OSError) as error:
        where = kubeconfig or "in-cluster or $KUBECONFIG"
        why = " ".join(str(error).split())
        raise SetupError(f"--kubeconfig: {where} cannot be used ({why}); give another") from error
    return ApiClient(configuration)


async def _require_crds(cluster: Cluster) -> None:
    try:
        known = "inferenceservices" in await cluster.resources(API_VERSION)
    except ClusterError as error:
        raise SetupError(f"the API server does not answer: {error}; check --kubeconfig") from error
    if not known:
        raise SetupError(f"the API server has no {API_VERSION}; apply manifests/crd first")


def _prepare_environment(arguments: argparse.Namespace) -> None:
    # kopf asks for the user's name, which a UID without a passwd entry has only from here; and its login reads the
    # kubeconfig's path from the environment alone.
    os.environ.setdefault("USER", "ullage-operator")
    if arguments.kubeconfig is not None:
        os.environ["KUBECONFIG"] = str(arguments.kubeconfig)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SetupError(f"{message}; see ullage-operator --help")


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ullage-operator",
        allow_abbrev=False,
        description="Keeps InferenceServices of a Kubernetes cluster.",
    )
    add = parser.add_argument
    release = version("ullage")
    add("--namespace", action="append", default=[], metavar="NS", help="serve this namespace only (repeatable)")
    add("--kubeconfig", type=_file, metavar="FILE", help="cluster to use when not running in one")
    add("--engine-image", default=environment.get("ULLAGE_ENGINE_IMAGE", f"ullage-engine:{release}"))
    add("--agent-image", default=environment.get("ULLAGE_AGENT_IMAGE", f"ullage-agent:{release}"))
    add("--sweep-seconds", type=_seconds, default=2.0, help="time between two sweeps of a service's agents")
    add("--max-disruptions", type=_count, default=10, help="disruptive actions in flight over all services")
    add("--http-host", default="0.0.0.0", help="address of /metrics, /healthz and /readyz")
    add("--http-port", type=_port, default=8080, help="port of the same; 0 for any free one")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(%(default)s)")
    add("--version", action="version", version=release)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 60:
        raise argparse.ArgumentTypeError(f"{text} is outside 0.05..60")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file; give a readable one")
    return Path(text)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is outside 0..65535")
    return value


if __name__ == "__main__":
    sys.exit(main())
