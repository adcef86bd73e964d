"""The operator against many services: a real API server, and all agents as fakes in one process.

    python bench/operator_scale.py [--services 1000] [--agents 3000] [--minutes 1] [--assets DIR]

Agents speak TLS with the certificate that the operator made for their service, and renew their report once a second
as real ones do. While the operator sweeps, agents cross the risk threshold one after another, at once from calm to
high: the hardest case, because a risk that rises is looked at more often before it is high. The time from the crossing
to the finished eviction is the reaction. The operator runs on one core; API server, fakes and whoever else uses the
machine share the rest, so figures of a busy machine are upper bounds.

Last line: JSON. `sweep_p99_s`: by how much later than it should an agent is read again; `gap_p99_s`: time between two
readings of one agent; `seen_p99_s`: from the crossing to the first reading that shows it (up to a second of it is the
agent's own interval); `written_p99_s`: from there to the eviction's arrival; `startup_s`: from the start of a restarted
operator until each agent was read; `creation_s`: the same for the first one, which makes all children;
`rss_growth_mb`: growth of resident memory over the measured time.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import resource
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from ullage_agent.wire import EngineIdentity, RiskReport, Snapshot, encode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "envtest"))

from cluster import Kubectl, establish  # noqa: E402  the tests' control plane is the benchmark's, too
from controlplane import ControlPlane  # noqa: E402
from kubelet import Api  # noqa: E402
from processes import http_get  # noqa: E402

from ullage_operator.crd import crds  # noqa: E402

NAMESPACE = "scale"
PORT = 9411
METRICS_PORT = 9412
SWEEP_S = 2.0
POLL_S = 1.0
DISRUPTIONS = 100
"""Actions in flight over all services: at two crossings a second the default of 10 would be what is measured."""
CALM, HIGH = 30.0, 95.0
MALLOC = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"
}  # fmt: skip
"""As `manifests/operator/deployment.yaml` sets it."""


@dataclass
class Agent:
    """One fake: what it would report, and when it was read."""

    phase: float = field(default_factory=random.random)
    crossed_at: float | None = None
    seen_at: float | None = None
    read_at: float = 0.0
    gaps: list[float] = field(default_factory=list)

    def polled(self, now: float) -> float:
        """When it last read its engine."""
        return now - ((now - self.phase) % POLL_S)

    def high(self, now: float) -> bool:
        """Whether its report shows the crossing."""
        return self.crossed_at is not None and self.crossed_at <= self.polled(now)

    def report(self, now: float) -> bytes:
        """As of the last poll."""
        polled = self.polled(now)
        score = HIGH if self.high(now) else CALM
        snapshot = Snapshot(
            sampled_at=polled,
            total_blocks=100,
            hot_blocks=int(score),
            reclaimable_blocks=0,
            free_blocks=100 - int(score),
            largest_free_run_blocks=100 - int(score),
            running=8,
            waiting=0,
        )
        report = RiskReport(
            engine=EngineIdentity(type="fake", instance="x"),
            generated_at=now,
            sample_age_s=now - polled,
            score=score,
            winner="classic",
            terms={"classic": score, "forecast": 0.0, "thrash": 0.0},
            snapshot=snapshot,
            capabilities=("evict", "throttle", "release"),
        )
        return encode(report)


class Fakes:
    """All agents behind one TLS socket; which is meant, the address that was called says."""

    def __init__(self, count: int, services: int) -> None:
        self._services = services
        self._next = 0
        self.agents = [Agent() for _ in range(count)]
        self.reactions: list[float] = []
        self.seen: list[float] = []
        self.written: list[float] = []
        self.contexts: dict[str, ssl.SSLContext] = {}
        self.unread = count

    async def serve(self) -> web.AppRunner:
        """Begin to serve."""
        app = web.Application()
        app.add_routes([web.get("/v1/risk", self._risk), web.post("/v1/actions/evict", self._evict)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = self._choose
        await web.TCPSite(runner, "0.0.0.0", PORT, ssl_context=context, backlog=4096).start()
        return runner

    def learn(self, secrets: list[dict[str, Any]]) -> None:
        """Take the certificates that the operator made."""
        for secret in secrets:
            name = secret["metadata"]["name"].removesuffix("-agent")
            if name == secret["metadata"]["name"] or name in self.contexts:
                continue
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            with tempfile.NamedTemporaryFile("wb") as file:
                file.write(base64.b64decode(secret["data"]["tls.crt"]) + base64.b64decode(secret["data"]["tls.key"]))
                file.flush()
                context.load_cert_chain(file.name)
            self.contexts[name] = context

    def reset(self) -> None:
        """Forget who was read."""
        self.unread = len(self.agents)
        for agent in self.agents:
            agent.read_at = 0.0
            agent.gaps.clear()

    def cross(self) -> None:
        """Let an agent cross the threshold, of a service that was longest left alone: no cooldown is in its way."""
        number = self._next % self._services
        mine = range(number, len(self.agents), self._services)
        self.agents[random.choice(mine)].crossed_at = time.time()
        self._next += 1

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        found = self.contexts.get((name or "").split(".")[0])
        if found is not None:
            connection.context = found

    def _agent(self, request: web.Request) -> Agent:
        assert request.transport is not None
        return self.agents[index_of(request.transport.get_extra_info("sockname")[0])]

    async def _risk(self, request: web.Request) -> web.Response:
        agent, now = self._agent(request), time.time()
        if agent.read_at:
            agent.gaps.append(now - agent.read_at)
        else:
            self.unread -= 1
        agent.read_at = now
        if agent.seen_at is None and agent.high(now):
            agent.seen_at = now
        return web.Response(body=agent.report(now), content_type="application/json")

    async def _evict(self, request: web.Request) -> web.Response:
        agent, now = self._agent(request), time.time()
        if agent.crossed_at is not None:
            seen = agent.seen_at or agent.crossed_at
            self.reactions.append(now - agent.crossed_at)
            self.seen.append(seen - agent.crossed_at)
            self.written.append(now - seen)
            agent.crossed_at = agent.seen_at = None
        body = {"action": "evict", "outcome": "Succeeded", "message": "freed", "blocks_freed": 65, "bytes_freed": 65000}
        return web.json_response(body)


def address_of(index: int) -> str:
    """Loopback address of an agent."""
    return f"127.{10 + index // 62500}.{index // 250 % 250}.{index % 250 + 1}"


def index_of(address: str) -> int:
    """The agent behind an address."""
    _, high, middle, low = (int(part) for part in address.split("."))
    return (high - 10) * 62500 + middle * 250 + low - 1


def populate(api: Api, services: int, agents: int) -> None:
    """Create everything that the operator finds: services, and pods as a cluster would run them."""
    api.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    api.call("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "default"}})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: _service(api, n), range(services)))
        list(pool.map(lambda n: _pod(api, n, n % services), range(agents)))


def _service(api: Api, number: int) -> None:
    spec = {
        "model": {"source": "/models/tiny"},
        "engine": {"kvCache": {"memory": "48Mi"}},
        "replicas": {"min": 1, "max": 8, "managedBy": "External"},
        "remediation": {"settleSeconds": 1},
    }
    metadata = {"name": f"s{number:04d}", "namespace": NAMESPACE}
    body = {"apiVersion": "ullage.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata, "spec": spec}
    api.call("POST", f"/apis/ullage.dev/v1alpha1/namespaces/{NAMESPACE}/inferenceservices", body)


def _pod(api: Api, number: int, service: int) -> None:
    name = f"s{service:04d}-{number:05d}"
    labels = {"ullage.dev/service": f"s{service:04d}", "ullage.dev/traffic": "on"}
    ports = [{"name": "actions", "containerPort": PORT}]
    spec = {"containers": [{"name": "agent", "image": "a", "ports": ports}], "automountServiceAccountToken": False}
    base = f"/api/v1/namespaces/{NAMESPACE}/pods"
    api.call("POST", base, {"metadata": {"name": name, "labels": labels}, "spec": spec})
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"phase": "Running", "podIP": address_of(number), "conditions": [ready]}
    api.call("PATCH", f"{base}/{name}/status", {"status": status}, "application/strategic-merge-patch+json")


class Operator:
    """The operator's process, on one core."""

    def __init__(self, kubeconfig: Path, log: Path, core: int) -> None:
        command = [
            sys.executable,
            "-m",
            "ullage_operator.main",
            f"--kubeconfig={kubeconfig}",
            f"--namespace={NAMESPACE}",
            f"--sweep-seconds={SWEEP_S}",
            f"--max-disruptions={DISRUPTIONS}",
            "--http-host=127.0.0.1",
            f"--http-port={METRICS_PORT}",
            "--log-level=warning",
        ]
        environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")} | MALLOC
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=file,
                env=environment,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )

    def cpu_s(self) -> float:
        """Processor seconds used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        """Resident memory."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS")) / 1024

    def stop(self) -> None:
        """SIGTERM and wait."""
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()

    def check(self) -> None:
        """Raise if it has ended."""
        if self._process.poll() is not None:
            raise SystemExit(f"error: the operator ended with status {self._process.returncode}")


async def all_read(api: Api, fakes: Fakes, operator: Operator, services: int) -> float:
    """Seconds until each agent was read."""
    began = time.monotonic()
    while fakes.unread:
        operator.check()
        if len(fakes.contexts) < services:
            found = await asyncio.to_thread(api.call, "GET", f"/api/v1/namespaces/{NAMESPACE}/secrets")
            fakes.learn(found["items"])
        print(f"  {len(fakes.contexts)} certificates, {fakes.unread} agents unread", file=sys.stderr, flush=True)
        await asyncio.sleep(1.0)
    return time.monotonic() - began


async def measure(fakes: Fakes, operator: Operator, seconds: float, per_second: float) -> dict[str, Any]:
    """Let agents cross the threshold one after another, and look at all figures over that time."""
    fakes.reset()
    began, cpu, rss = time.monotonic(), operator.cpu_s(), operator.rss_mb()
    crossed, calls, rss_by_minute = 0, api_calls(), [round(rss, 1)]
    while time.monotonic() - began < seconds:
        operator.check()
        if time.monotonic() - began >= 60 * len(rss_by_minute):
            rss_by_minute.append(round(operator.rss_mb(), 1))
        fakes.cross()
        crossed += 1
        await asyncio.sleep(1 / per_second)
    wall = time.monotonic() - began
    used = operator.cpu_s() - cpu
    calls = api_calls() - calls
    await asyncio.sleep(10.0)  # the last ones are answered
    gaps = [gap for agent in fakes.agents for gap in agent.gaps]
    return {
        **spread("sweep", [max(0.0, gap - SWEEP_S) for gap in gaps]),
        **spread("gap", gaps),
        **spread("reaction", fakes.reactions),
        **spread("seen", fakes.seen),
        **spread("written", fakes.written),
        "reads_per_s": round(len(gaps) / wall, 1),
        "crossings": crossed,
        "evictions": len(fakes.reactions),
        "api_calls_per_s": round(calls / wall, 1),
        "cpu_cores": round(used / wall, 3),
        "rss_mb": round(operator.rss_mb(), 1),
        "rss_growth_mb": round(operator.rss_mb() - rss, 1),
        "rss_by_minute_mb": rss_by_minute,
        "load_average": round(os.getloadavg()[0], 1),
    }


def api_calls() -> float:
    """Calls to the API server that the operator has made."""
    text = http_get(f"http://127.0.0.1:{METRICS_PORT}/metrics")
    lines = [line for line in text.splitlines() if line.startswith("ullage_operator_api_calls_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    ordered = sorted(values)
    return {f"{name}_p50_s": round(quantile(ordered, 0.5), 3), f"{name}_p99_s": round(quantile(ordered, 0.99), 3)}


def quantile(ordered: list[float], share: float) -> float:
    """The value below which that share lies; NaN of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def run(arguments: argparse.Namespace, plane: ControlPlane) -> dict[str, Any]:
    """All phases."""
    api, fakes = Api(plane), Fakes(arguments.agents, arguments.services)
    began = time.monotonic()
    await asyncio.to_thread(populate, api, arguments.services, arguments.agents)
    print(f"populated in {time.monotonic() - began:.0f} s", file=sys.stderr)
    runner = await fakes.serve()
    core = max(os.sched_getaffinity(0))
    try:
        first = Operator(plane.kubeconfig, arguments.log, core)
        try:
            creation = await all_read(api, fakes, first, arguments.services)
        finally:
            first.stop()
        fakes.reset()
        second = Operator(plane.kubeconfig, arguments.log, core)
        try:
            startup = await all_read(api, fakes, second, arguments.services)
            figures = await measure(fakes, second, arguments.minutes * 60, arguments.crossings)
        finally:
            second.stop()
    finally:
        await runner.cleanup()
    return {"creation_s": round(creation, 1), "startup_s": round(startup, 1), **figures}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--agents", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=1.0, help="measured time; 30 shows whether memory stays flat")
    parser.add_argument("--crossings", type=float, default=2.0, help="agents that cross the threshold, per second")
    parser.add_argument("--assets", type=Path, default=Path("/usr/local/kubebuilder/bin"))
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "operator_scale.log")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))

    def install(plane: ControlPlane) -> None:
        kubectl = Kubectl(plane.kubeconfig, plane.folder / "kubectl")
        establish(kubectl, crds(cel=plane.version() >= (1, 25)).values())

    with ControlPlane(arguments.assets, before_controllers=install) as plane:
        plane.stop_controllers()  # nobody is to make pods of the Deployments: the fakes' pods are all there are
        figures = asyncio.run(run(arguments, plane))
    print(json.dumps({"services": arguments.services, "agents": arguments.agents, **figures}))


if __name__ == "__main__":
    main()
