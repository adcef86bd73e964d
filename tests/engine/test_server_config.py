"""Settings and arguments: what cannot work ends in one line that names the flag and its value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_engine.config import EngineConfig, ServerConfig, TcpAddress, UnixAddress, parse_size
from ullage_engine.errors import ConfigError
from ullage_engine.main import main, parse_arguments
from ullage_engine.request import KvBudget


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("1", 1),
        ("7b", 7),
        ("48MiB", 48 << 20),
        ("48Mi", 48 << 20),
        ("48mib", 48 << 20),
        (" 48 MiB ", 48 << 20),
        ("0.5GiB", 1 << 29),
        ("1.5Ki", 1536),
        ("48MB", 48_000_000),
        ("2k", 2000),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, name="--kv-memory") == size


@pytest.mark.parametrize(
    "text", ["", "-1", "0", "0MiB", "nan", "inf", "1e9", "48 mebi", "0.1", ".5GiB", "1_000", "9" * 30, "5PiB", "４８"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-memory: "):
        parse_size(text, name="--kv-memory")


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        assert parse_size(text, name="--x") >= 1
    except ConfigError as error:
        assert str(error).startswith("--x: ")


def test_all_arguments(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\none\n\n  two \n")
    arguments = (
        "--model folder --served-name n --host ::1 --port 0 --admin unix:/run/a.sock --kv-memory 48MiB --kv-type int8 "
        "--host-memory 2GiB --disk-dir /spill --disk-memory 8GB --check-tiers "
        "--block-size 32 --max-model-len 2048 --max-batch-tokens 128 --max-sequences 8 --max-queue 0 --dtype bfloat16 "
        "--threads 2 --kv-budget 30% --eviction-policy recency --evict-interval 64 --protected-tokens 0 "
        "--recent-tokens 16 --no-prefix-reuse "
        f"--cache-dir /cache --api-key-file {keys} --max-body 1MiB --drain-seconds 2.5 --health-step-age 9 "
        "--max-wait-seconds 7 --ready-step-age 3"
    ).split()
    engine, server = parse_arguments(arguments)
    assert engine == EngineConfig(
        model="folder",
        served_name="n",
        kv_memory=48 << 20,
        host_memory=2 << 30,
        disk_dir=Path("/spill"),
        disk_memory=8_000_000_000,
        check_tiers=True,
        kv_type="int8",
        block_size=32,
        max_model_len=2048,
        max_batch_tokens=128,
        max_sequences=8,
        max_queue=0,
        dtype="bfloat16",
        threads=2,
        kv_budget=KvBudget(share=0.3),
        eviction_policy="recency",
        evict_interval=64,
        protected_tokens=0,
        recent_tokens=16,
        prefix_reuse=False,
        cache_dir=Path("/cache"),
    )
    assert server == ServerConfig(
        public=TcpAddress("::1", 0),
        admin=UnixAddress(Path("/run/a.sock")),
        api_keys=frozenset({"one", "two"}),
        max_body_bytes=1 << 20,
        max_wait_s=7,
        drain_seconds=2.5,
        health_step_age_s=9,
        ready_step_age_s=3,
    )


def test_defaults_are_the_documented_ones() -> None:
    engine, server = parse_arguments(["--model", "m"])
    assert engine == EngineConfig(model="m", cache_dir=engine.cache_dir)
    assert server == ServerConfig()
    assert (server.public, server.admin) == (TcpAddress("0.0.0.0", 8000), None)
    assert (engine.kv_type, engine.block_size, engine.max_batch_tokens, engine.max_sequences) == ("fp8", 16, 512, 64)
    assert (server.drain_seconds, server.health_step_age_s) == (30, 60)


def test_admin_on_loopback() -> None:
    for text, address in (
        ("127.0.0.1:8001", TcpAddress("127.0.0.1", 8001)),
        ("[::1]:0", TcpAddress("::1", 0)),
        ("localhost:9", TcpAddress("localhost", 9)),
    ):
        assert parse_arguments(["--model", "m", "--admin", text])[1].admin == address
    assert str(TcpAddress("::1", 5)) == "[::1]:5"


BAD_BUDGETS = ("0%", "101%", "0.5", "1", "2.5", "nan", "nan%", "inf", "half", "1e999")
BAD_ARGUMENTS = [
    ("--model", ["--port", "1"]),
    ("--model", ["--model", " "]),
    ("--bogus", ["--model", "m", "--bogus", "1"]),
    ("--mod", ["--mod", "m", "--model", "m"]),
    ("--port", ["--model", "m", "--port", "x"]),
    ("--port", ["--model", "m", "--port", "65536"]),
    ("--port", ["--model", "m", "--port", "9" * 30]),
    ("--port", ["--model", "m", "--port=-1"]),
    ("--served-name", ["--model", "m", "--served-name", ""]),
    ("--kv-type", ["--model", "m", "--kv-type", "fp4"]),
    ("--kv-memory", ["--model", "m", "--kv-memory", "lots"]),
    ("--block-size", ["--model", "m", "--block-size", "17"]),
    ("--max-model-len", ["--model", "m", "--max-model-len", "0"]),
    ("--max-batch-tokens", ["--model", "m", "--max-batch-tokens", "63"]),
    ("--max-sequences", ["--model", "m", "--max-sequences", "0"]),
    ("--max-queue", ["--model", "m", "--max-queue=-1"]),
    ("--recent-tokens", ["--model", "m", "--recent-tokens=-1"]),
    ("--threads", ["--model", "m", "--threads", "0"]),
    ("--dtype", ["--model", "m", "--dtype", "float8"]),
    ("--eviction-policy", ["--model", "m", "--eviction-policy", "random"]),
    *(("--kv-budget", ["--model", "m", "--kv-budget", bad]) for bad in BAD_BUDGETS),
    ("--evict-interval", ["--model", "m", "--evict-interval", "0"]),
    ("--admin", ["--model", "m", "--admin", "0.0.0.0:8001"]),
    ("--admin", ["--model", "m", "--admin", "nowhere"]),
    ("--admin", ["--model", "m", "--admin", "unix:"]),
    ("--admin", ["--model", "m", "--admin", ":8001"]),
    ("--admin", ["--model", "m", "--admin", "127.0.0.1:99999"]),
    ("--drain-seconds", ["--model", "m", "--drain-seconds", "nan"]),
    ("--drain-seconds", ["--model", "m", "--drain-seconds", "soon"]),
    ("--health-step-age", ["--model", "m", "--health-step-age", "0"]),
    ("--ready-step-age", ["--model", "m", "--ready-step-age", "inf"]),
    ("--max-body", ["--model", "m", "--max-body", "10"]),
    ("--max-wait-seconds", ["--model", "m", "--max-wait-seconds", "0"]),
    ("--max-wait-seconds", ["--model", "m", "--max-wait-seconds", "nan"]),
    ("--api-key-file", ["--model", "m", "--api-key-file", "/no/such/file"]),
]


@pytest.mark.parametrize(("flag", "arguments"), BAD_ARGUMENTS, ids=lambda value: " ".join(value))
def test_bad_arguments(flag: str, arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    def build(_: Any) -> Any:
        raise AssertionError("nothing must be loaded")

    assert main(arguments, build) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert flag in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"# none\n\n", b"\xff\xfe"])
def test_key_files_without_keys(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^--api-key-file: "):
        parse_arguments(["--model", "m", "--api-key-file", str(path)])


def test_a_model_that_cannot_be_loaded_ends_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    def build(config: EngineConfig) -> Any:
        raise ConfigError(f"--model: {config.model!r} cannot be read:\n no such file")

    assert main(["--model", "m", "--host", "127.0.0.1", "--port", "0"], build) == 2
    assert capfd.readouterr().err == "error: --model: 'm' cannot be read: no such file\n"


def test_cache_settings_reach_the_engine() -> None:
    flags = "--kv-memory 60% --kv-group 32 --kv-bf16-layers 0,29 --kv-centring"
    config, _ = parse_arguments(["--model", "m", *flags.split()])
    assert (config.kv_memory, config.kv_fraction, config.kv_group) == (None, 0.6, 32)
    assert config.kv_bf16_layers == {0, 29}
    assert config.kv_centring


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--kv-memory 0%", "--kv-memory: 0.0 cannot work; give a share above 0% and below 100%"),
        ("--kv-memory 100%", "below 100%"),
        ("--kv-memory x%", "'x%' is no share; write a percentage such as 60%"),
        ("--kv-group 0", "--kv-group: 0 cannot work"),
        ("--kv-bf16-layers 1,x", "'x' is not a whole number"),
    ],
)
def test_bad_cache_settings(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_arguments(["--model", "m", *flags.split()])


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("2048", KvBudget(tokens=2048)),
        ("2", KvBudget(tokens=2)),
        ("100%", KvBudget(share=1.0)),
        ("12.5%", KvBudget(share=0.125)),
    ],
)
def test_budgets(text: str, budget: KvBudget) -> None:
    assert parse_arguments(["--model", "m", "--kv-budget", text])[0].kv_budget == budget


def test_policies_are_those_that_there_are() -> None:
    from ullage_engine import policies
    from ullage_engine.config import EVICTION_POLICIES

    assert policies.NAMES == EVICTION_POLICIES
    assert EngineConfig(model="m").eviction_policy == policies.DEFAULT
