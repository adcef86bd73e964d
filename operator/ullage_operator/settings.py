"""The operator's command line."""

from __future__ import annotations

import argparse
import socket
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from ullage_operator.errors import SetupError

DEFAULT_NAMESPACE = "ullage-system"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SetupError(f"{message}; see ullage-operator --help")


def parse(argv: Sequence[str] | None, environment: Mapping[str, str]) -> argparse.Namespace:
    """The settings.

    Raises:
        SetupError: a mistake in them.
    """
    made = _parser(environment)
    arguments = made.parse_args(argv)
    if (arguments.endpoint_cert is None) != (arguments.endpoint_key is None):
        made.error("--endpoint-cert and --endpoint-key: one is missing; give both or none")
    if arguments.endpoint_name is None:
        arguments.endpoint_name = f"ullage-operator.{arguments.operator_namespace}.svc"
    return arguments


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    made = _Parser(
        prog="ullage-operator",
        allow_abbrev=False,
        description="Keeps InferenceServices of a Kubernetes cluster.",
    )
    _watching(made, environment)
    _ports(made)
    _leading(made, environment)
    made.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(%(default)s)"
    )
    made.add_argument("--log-format", choices=("plain", "json"), default="plain", help="(%(default)s)")
    made.add_argument("--version", action="version", version=version("ullage"))
    return made


def _watching(made: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    add, release = made.add_argument, version("ullage")
    add("--namespace", action="append", default=[], metavar="NS", help="serve this namespace only (repeatable)")
    add("--kubeconfig", type=_file, metavar="FILE", help="cluster to use when not running in one")
    add("--engine-image", default=environment.get("ULLAGE_ENGINE_IMAGE", f"ullage-engine:{release}"))
    add("--agent-image", default=environment.get("ULLAGE_AGENT_IMAGE", f"ullage-agent:{release}"))
    add("--sweep-seconds", type=_seconds, default=2.0, help="time between two sweeps of a service's agents")
    add("--max-disruptions", type=_count, default=10, help="disruptive actions in flight over all services")


def _ports(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add("--http-host", default="0.0.0.0", help="address of all ports")
    add("--http-port", type=_port, default=8080, help="port of /metrics, /healthz and /readyz; 0 for any free one")
    add("--endpoint-port", type=_port, metavar="PORT", help="TLS port of /validate and /v1/alerts; without it, none")
    add("--endpoint-name", metavar="DNS", help="name in its certificate (ullage-operator.NAMESPACE.svc)")
    add("--endpoint-secret", default="ullage-operator-endpoint", help="Secret with its certificate and token")
    add("--endpoint-cert", type=_file, metavar="FILE", help="its certificate, where somebody else makes it")
    add("--endpoint-key", type=_file, metavar="FILE", help="key of that certificate")
    add("--webhook", metavar="NAME", help="ValidatingWebhookConfiguration whose caBundle is kept up to date")


def _leading(made: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    add = made.add_argument
    namespace = environment.get("POD_NAMESPACE") or DEFAULT_NAMESPACE
    host = environment.get("POD_NAME") or socket.gethostname()
    add("--leader-elect", action="store_true", help="several operators run, and one decides")
    add("--lease", default="ullage-operator", help="name of the Lease (%(default)s)")
    add("--identity", default=f"{host}_{uuid.uuid4().hex[:8]}", help="this candidate's name")
    add("--operator-namespace", default=namespace, help="namespace of Lease and Secret (%(default)s)")


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
