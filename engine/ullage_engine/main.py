"""`ullage-engine`: arguments, signals, and the order of the start.

Order: check every setting, take the addresses, load the model, serve. A setting that cannot work ends the start
with one line `error: …` on stderr and exit status 2. Once it serves it prints one line `ready: {json}`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ullage_engine.api.core import LoadedEngine
from ullage_engine.config import (
    BLOCK_SIZES,
    DTYPES,
    EVICTION_POLICIES,
    KERNELS,
    KV_TYPES,
    NUMERICS,
    SPECULATIONS,
    EngineConfig,
    ServerConfig,
    TcpAddress,
    UnixAddress,
    default_cache_dir,
    parse_size,
)
from ullage_engine.errors import ConfigError
from ullage_engine.request import KvBudget
from ullage_engine.server import Sockets, Stop, bind, require_loopback, serve

Builder = Callable[[EngineConfig], LoadedEngine]


class _Parser(argparse.ArgumentParser):
    """Reports errors as ConfigError, so that they leave the program like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def parse_arguments(arguments: Sequence[str]) -> tuple[EngineConfig, ServerConfig]:
    """Settings from the command line.

    Raises:
        ConfigError: an argument that cannot work.
    """
    parsed = _parser().parse_args(arguments)
    return _engine_config(parsed), _server_config(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ullage-engine", description=__doc__.splitlines()[0], allow_abbrev=False)
    _add_model_options(parser.add_argument_group("model"))
    _add_cache_options(parser.add_argument_group("KV cache and batch"))
    _add_server_options(parser.add_argument_group("server"))
    return parser


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", required=True, metavar="SRC", help="Hugging Face folder, .gguf file or package://MODULE/FILE"
    )
    group.add_argument("--served-name", metavar="NAME", help="the name that clients use")
    group.add_argument("--max-model-len", type=_whole, metavar="N", help="most tokens of prompt and answer")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and activations")
    group.add_argument("--threads", type=_whole, metavar="N", help="CPU threads of torch")
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default="auto",
        help="native: compiled for this CPU; triton: for a GPU; torch: neither (%(default)s)",
    )
    group.add_argument(
        "--numerics",
        choices=NUMERICS,
        default="fast",
        help="invariant: an answer never depends on what else is in the batch; slower (%(default)s)",
    )
    group.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache_dir(),
        metavar="DIR",
        help="keep converted weights and compiled kernels here (%(default)s)",
    )


def _add_cache_options(group: argparse._ArgumentGroup) -> None:
    defaults = EngineConfig(model="defaults")
    group.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="of the KV cache: 48MiB, or 60%% of what is left",
    )
    group.add_argument("--host-memory", metavar="SIZE", help="of host memory for blocks that leave the cache: 2GiB")
    group.add_argument("--disk-dir", type=Path, metavar="DIR", help="folder for blocks that leave that memory in turn")
    group.add_argument("--disk-memory", metavar="SIZE", help="of blocks that --disk-dir may hold")
    group.add_argument("--check-tiers", action="store_true", help="checksums of all that goes to --host-memory, too")
    group.add_argument("--kv-type", choices=KV_TYPES, default=defaults.kv_type, help="how keys and values are kept")
    group.add_argument("--kv-group", type=_whole, metavar="N", help="channels that share a scale")
    group.add_argument("--kv-bf16-layers", type=_numbers, default=frozenset(), metavar="N,…", help="layers in bf16")
    group.add_argument("--kv-centring", action="store_true", help="leave each head's mean key out of the cache")
    group.add_argument("--block-size", type=_whole, choices=BLOCK_SIZES, default=defaults.block_size)
    for flag, default, text in (
        ("--max-batch-tokens", defaults.max_batch_tokens, "tokens computed in one step"),
        ("--max-sequences", defaults.max_sequences, "sequences running at once"),
        ("--max-queue", defaults.max_queue, "requests waiting at once"),
        ("--protected-tokens", defaults.protected_tokens, "first tokens never evicted; of a budget 1/16 at most"),
        ("--recent-tokens", defaults.recent_tokens, "last tokens never evicted; of a budget 1/8 at most"),
        ("--evict-interval", defaults.evict_interval, "tokens beyond a budget that decoding may reach"),
        ("--speculation-tokens", defaults.speculation_tokens, "tokens drafted at most for a sequence in a step"),
    ):
        group.add_argument(flag, type=_whole, default=default, metavar="N", help=f"{text} (%(default)s)")
    group.add_argument(
        "--kv-budget", type=_budget, metavar="N|P%", help="tokens a sequence may keep, or a share of its own (all)"
    )
    group.add_argument(
        "--eviction-policy",
        choices=EVICTION_POLICIES,
        default=defaults.eviction_policy,
        help="chooses what a sequence with a budget keeps (%(default)s)",
    )
    group.add_argument(
        "--speculation",
        choices=SPECULATIONS,
        default=defaults.speculation,
        help="draft coming tokens from the request's own text, or by --draft-model (%(default)s)",
    )
    group.add_argument("--draft-model", metavar="SRC", help="smaller model of the same vocabulary")
    group.add_argument("--no-prefix-reuse", action="store_true", help="compute every prompt anew")


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    defaults = ServerConfig()
    group.add_argument("--host", default=defaults.public.host, help="public address (%(default)s)")
    group.add_argument(
        "--port", type=_whole, default=defaults.public.port, help="public port, 0: any free one (%(default)s)"
    )
    group.add_argument("--admin", metavar="unix:PATH|HOST:PORT", help="admin interface, inside the pod only")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys that clients must send, one a line")
    group.add_argument("--max-body", metavar="SIZE", help="greatest request body (1MiB)")
    for flag, default, text in (
        ("--max-wait-seconds", defaults.max_wait_s, "end calls that waited in the queue for so long"),
        ("--drain-seconds", defaults.drain_seconds, "let requests finish for so long when stopped"),
        ("--health-step-age", defaults.health_step_age_s, "/health fails when the step loop stands for so long"),
        ("--ready-step-age", defaults.ready_step_age_s, "/ready fails when the step loop stands for so long"),
    ):
        group.add_argument(flag, type=_seconds, default=default, metavar="S", help=f"{text} (%(default)g)")


def _whole(text: str) -> int:
    if not text.removeprefix("-").isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _numbers(text: str) -> frozenset[int]:
    return frozenset(_whole(part.strip()) for part in text.split(","))


def _kv_size(text: str | None) -> dict[str, Any]:
    """`kv_memory` or `kv_fraction` from the argument."""
    if text is None or not text.strip().endswith("%"):
        return {"kv_memory": None if text is None else parse_size(text, name="--kv-memory")}
    try:
        return {"kv_fraction": float(text.strip().removesuffix("%")) / 100}
    except ValueError as error:
        raise ConfigError(f"--kv-memory: {text!r} is no share; write a percentage such as 60%") from error


def _size(text: str | None, flag: str) -> int | None:
    return None if text is None else parse_size(text, name=flag)


def _budget(text: str) -> KvBudget:
    """`2048` tokens, or `30%` of each sequence's own."""
    percent = text.strip().endswith("%")
    try:
        number = float(text.strip().removesuffix("%"))
        if not percent and number <= 1:
            raise ValueError("write a share as a percentage")
        return KvBudget.of(number / 100 if percent else number)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no budget; write a whole number of tokens from 2 on, or a percentage such as 30%"
        ) from error


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from error


def _engine_config(parsed: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=parsed.model,
        served_name=parsed.served_name,
        **_kv_size(parsed.kv_memory),
        kv_type=parsed.kv_type,
        kv_group=parsed.kv_group,
        kv_bf16_layers=parsed.kv_bf16_layers,
        kv_centring=parsed.kv_centring,
        block_size=parsed.block_size,
        host_memory=_size(parsed.host_memory, "--host-memory"),
        disk_dir=parsed.disk_dir,
        disk_memory=_size(parsed.disk_memory, "--disk-memory"),
        check_tiers=parsed.check_tiers,
        max_model_len=parsed.max_model_len,
        max_batch_tokens=parsed.max_batch_tokens,
        max_sequences=parsed.max_sequences,
        max_queue=parsed.max_queue,
        dtype=parsed.dtype,
        threads=parsed.threads,
        kernels=parsed.kernels,
        numerics=parsed.numerics,
        speculation=parsed.speculation,
        draft_model=parsed.draft_model,
        speculation_tokens=parsed.speculation_tokens,
        kv_budget=parsed.kv_budget,
        eviction_policy=parsed.eviction_policy,
        evict_interval=parsed.evict_interval,
        protected_tokens=parsed.protected_tokens,
        recent_tokens=parsed.recent_tokens,
        prefix_reuse=not parsed.no_prefix_reuse,
        cache_dir=parsed.cache_dir,
    )


def _server_config(parsed: argparse.Namespace) -> ServerConfig:
    defaults = ServerConfig()
    max_body = defaults.max_body_bytes
    if parsed.max_body is not None:
        max_body = parse_size(parsed.max_body, name="--max-body")
    return ServerConfig(
        public=TcpAddress(parsed.host, _port(parsed.port, "--port")),
        admin=None if parsed.admin is None else parse_admin(parsed.admin),
        api_keys=frozenset() if parsed.api_key_file is None else _read_keys(parsed.api_key_file),
        max_body_bytes=max_body,
        max_wait_s=parsed.max_wait_seconds,
        drain_seconds=parsed.drain_seconds,
        health_step_age_s=parsed.health_step_age,
        ready_step_age_s=parsed.ready_step_age,
    )


def parse_admin(text: str) -> UnixAddress | TcpAddress:
    """The admin address: `unix:PATH`, or `HOST:PORT` on loopback.

    Raises:
        ConfigError: neither, or reachable from outside.
    """
    if text.startswith("unix:"):
        if not text.removeprefix("unix:"):
            raise ConfigError(f"--admin: {text!r} has no path; write unix:PATH")
        return UnixAddress(Path(text.removeprefix("unix:")))
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or len(port) > 5:
        raise ConfigError(f"--admin: {text!r} is no address; write unix:PATH or HOST:PORT")
    address = TcpAddress(host.removeprefix("[").removesuffix("]"), _port(int(port), "--admin"))
    require_loopback(address)
    return address


def _port(port: int, flag: str) -> int:
    if not 0 <= port <= 65535:
        raise ConfigError(f"{flag}: {port} is no port; give 1 to 65535, or 0 for any free one")
    return port


def _read_keys(path: Path) -> frozenset[str]:
    try:
        lines = path.read_text("ascii").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--api-key-file: {str(path)!r} cannot be read as ASCII text: {error}") from error
    keys = frozenset(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file: {str(path)!r} has no key; write one a line")
    return keys


def run(engine_config: EngineConfig, server_config: ServerConfig, build: Builder) -> None:
    """Take the addresses, load the model, serve until SIGTERM or SIGINT."""
    # while the model loads no event loop listens for it: end as an exception, so that what was taken is given back
    signal.signal(signal.SIGTERM, _terminated)
    sockets = bind(server_config)
    try:
        engine = build(engine_config)
        try:
            asyncio.run(_serve(engine, sockets, server_config))
        finally:
            engine.close()
    finally:
        sockets.close()


def _terminated(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


async def _serve(engine: LoadedEngine, sockets: Sockets, config: ServerConfig) -> None:
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.ask)
    await serve(engine, sockets, config, stop=stop, announce=_announce)


def _announce(addresses: dict[str, Any]) -> None:
    sys.stdout.write(f"ready: {json.dumps(addresses)}\n")
    sys.stdout.flush()


def _build(config: EngineConfig) -> LoadedEngine:
    from ullage_engine.loop import build_engine  # torch and transformers take seconds: after all cheap checks

    engine: LoadedEngine = build_engine(config)
    return engine


def main(arguments: Sequence[str] | None = None, build: Builder = _build) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        run(*parse_arguments(sys.argv[1:] if arguments is None else arguments), build)
    except ConfigError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
