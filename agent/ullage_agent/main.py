"""`ullage-agent`: command line, signals, exit status. 0 after a stop that was asked for, 2 for a bad setting."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from ullage_agent import logs
from ullage_agent.adapters import BUILTIN_ADAPTERS
from ullage_agent.app import Agent
from ullage_agent.config import AgentConfig
from ullage_agent.errors import ConfigError

USAGE_STATUS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; the process's exit status."""
    try:
        arguments = _parser().parse_args(argv)
        logs.configure(arguments.log_format, arguments.log_level)
        asyncio.run(_serve(_config(arguments)))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE_STATUS
    return 0


async def _serve(config: AgentConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Agent(config) as agent:
        sys.stdout.write(f"ready: {json.dumps(ready_facts(agent))}\n")
        sys.stdout.flush()
        await agent.run_until(stop)


def ready_facts(agent: Agent) -> dict[str, str | None]:
    """What the `ready:` line says: URLs really bound; `actions` is null where that port is not opened."""
    facts = {"metrics": _url("http", agent.metrics_address), "actions": _url("https", agent.action_address)}
    if agent.action_address is None:
        facts["actions_closed"] = "no --tls-cert, --tls-key and --token-file given"
    return facts


def _url(scheme: str, address: tuple[str, int] | None) -> str | None:
    if address is None:
        return None
    host, port = address
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _config(arguments: argparse.Namespace) -> AgentConfig:
    return AgentConfig(
        engine=arguments.engine,
        engine_url=arguments.engine_url,
        metrics_host=arguments.metrics_host,
        metrics_port=arguments.metrics_port,
        action_host=arguments.action_host,
        action_port=arguments.action_port,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        token_file=arguments.token_file,
        poll_seconds=arguments.poll_seconds,
        gate_file=arguments.gate_file,
        cgroup=arguments.cgroup,
        watch_devices=not arguments.no_devices,
        canary_seconds=arguments.canary_seconds,
        reflex_seconds=arguments.reflex_seconds,
        record=arguments.record,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage."""
        raise ConfigError(f"{message}; see ullage-agent --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ullage-agent",
        allow_abbrev=False,
        description="Watches one LLM engine: KV-cache metrics and risk for Prometheus, actions for the operator.",
    )
    add = parser.add_argument
    add("--engine", required=True, choices=sorted(BUILTIN_ADAPTERS), help="kind of engine")
    add(
        "--engine-url",
        required=True,
        metavar="URL",
        help="http://HOST:PORT or unix:PATH; a scenario file for fake",
    )
    add("--metrics-host", default="0.0.0.0", metavar="H", help="address of the plain port (%(default)s)")
    add("--metrics-port", type=int, default=9400, metavar="P", help="metrics and probes (%(default)s; 0: any)")
    add("--action-host", default="0.0.0.0", metavar="H", help="address of the TLS port (%(default)s)")
    add("--action-port", type=int, default=9401, metavar="P", help="risk and actions (%(default)s; 0: any)")
    add("--tls-cert", type=Path, metavar="F", help="PEM certificate chain of the TLS port")
    add("--tls-key", type=Path, metavar="F", help="its unencrypted PEM key")
    add("--token-file", type=Path, metavar="F", help="file with the bearer token")
    add("--poll-seconds", type=float, default=1.0, metavar="S", help="time between readings (%(default)s)")
    add("--gate-file", type=Path, metavar="F", help="state file of the admission gate that the engine has loaded")
    add("--cgroup", type=Path, metavar="DIR", help="folder of the engine's control group, to watch its host memory")
    add("--no-devices", action="store_true", help="do not look for accelerators through NVML")
    add("--canary-seconds", type=float, default=0.0, metavar="S", help="ask a quiet engine for one token (0: never)")
    add("--reflex-seconds", type=float, default=0.0, metavar="S", help="act alone after this long critical (0: never)")
    add("--record", type=Path, metavar="F", help="record readings and actions for replay (gzip if it ends in .gz)")
    add("--log-format", choices=("plain", "json"), default="plain", help="(%(default)s)")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(%(default)s)")
    add("--version", action="version", version=version("ullage"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
