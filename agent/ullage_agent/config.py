"""Settings of one agent, checked when made. Nothing is read from the environment or from files here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ullage_agent.errors import ConfigError

GATED = ("vllm", "sglang")
"""Engines that the admission gate can be loaded into."""
MIN_POLL_SECONDS = 0.05
MAX_POLL_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Each field is the command line option of the same name.

    Raises:
        ConfigError: a value cannot work.
    """

    engine: str
    """Name of the adapter."""
    engine_url: str
    """`unix:PATH` or `http://HOST:PORT`; for `fake` a scenario file."""
    metrics_host: str = "0.0.0.0"
    metrics_port: int = 9400
    """0: any free one."""
    action_host: str = "0.0.0.0"
    action_port: int = 9401
    """0: any free one. Opened only with certificate, key and token."""
    tls_cert: Path | None = None
    """PEM chain; reread when it changes."""
    tls_key: Path | None = None
    token_file: Path | None = None
    """Holds the bearer token; reread when it changes."""
    gate_file: Path | None = None
    """State of the admission gate that the engine has loaded."""
    cgroup: Path | None = None
    """Folder of the engine's control group; None: its memory is not watched."""
    watch_devices: bool = True
    """Read accelerators through NVML where there is a driver."""
    canary_seconds: float = 0.0
    """A quiet engine is asked for one token this often; 0: never."""
    reflex_seconds: float = 0.0
    """The agent acts by itself once the score was critical for this long without anyone acting; 0: never."""
    record: Path | None = None
    """File that readings and actions are recorded to."""
    poll_seconds: float = 1.0
    """From the start of one reading to the start of the next."""

    def __post_init__(self) -> None:
        for name, port in (("--metrics-port", self.metrics_port), ("--action-port", self.action_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(f"{name} {port} is no port; give 0 (any free one) to 65535")
        if not (math.isfinite(self.poll_seconds) and MIN_POLL_SECONDS <= self.poll_seconds <= MAX_POLL_SECONDS):
            raise ConfigError(
                f"--poll-seconds {self.poll_seconds:g} is outside {MIN_POLL_SECONDS:g}..{MAX_POLL_SECONDS:g}; "
                "1 is usual"
            )
        for name, seconds, least in (
            ("--canary-seconds", self.canary_seconds, 5.0),
            ("--reflex-seconds", self.reflex_seconds, 5.0),
        ):
            if not math.isfinite(seconds) or (seconds != 0 and not least <= seconds <= 86_400):
                raise ConfigError(f"{name} {seconds:g} is outside {least:g}..86400; 0 switches it off")
        if self.gate_file is not None and self.engine not in GATED:
            raise ConfigError(
                f"--gate-file {self.gate_file} is of no use to --engine {self.engine}, which throttles by itself; "
                "leave it out"
            )
        files = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--token-file": self.token_file}
        missing = [name for name, path in files.items() if path is None]
        if missing and len(missing) < len(files):
            raise ConfigError(
                f"{' and '.join(missing)} missing: the action port needs --tls-cert, --tls-key and --token-file; "
                "give all three or none"
            )

    @property
    def read_timeout_s(self) -> float:
        """Bound on one reading."""
        return max(2.0, self.poll_seconds)

    @property
    def fresh_s(self) -> float:
        """A sample younger than this makes the agent ready: three polls and a slow answer."""
        return 3 * self.poll_seconds + self.read_timeout_s

    @property
    def stale_after_s(self) -> float:
        """A sample older than this is no longer exported."""
        return max(30.0, 10 * self.poll_seconds)

    @property
    def forecast_horizon_s(self) -> float:
        """Long enough for a trend at any pace."""
        return max(30.0, 6 * self.poll_seconds)
