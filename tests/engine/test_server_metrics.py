"""What Prometheus reads: valid, complete, and in agreement with the snapshot."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ullage_engine.fake_core import FakeCore
from ullage_engine.metrics import COUNTERS, PREFIX, make_registry
from ullage_engine.request import AdmissionLimit, GenerationRequest, TokenOutput
from ullage_engine.snapshot import Counters, TierState

Open = Callable[..., Any]


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(address: str, accept: str = "") -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.get(f"{address}/metrics", headers={"Accept": accept})


async def test_scrape(core: FakeCore, open_engine: Open) -> None:
    tokens = [65, 66, 67]

    def script(request: GenerationRequest) -> list[TokenOutput]:
        name = request.request_id
        plain = [TokenOutput(request_id=name, token=token) for token in tokens[:-1]]
        return [*plain, TokenOutput(request_id=name, token=tokens[-1], finish_reason="length")]

    core.script = script
    core.pool.cached = 6
    core.age_s = 1.5
    async with open_engine() as addresses:
        async with httpx.AsyncClient(base_url=addresses["public"]) as http:
            for stream in (False, True):
                await http.post("/v1/completions", json={"model": "fake", "prompt": "x", "n": 2, "stream": stream})
            await http.post("/v1/completions", json={"model": "fake"})
            await http.get("/made/up")
        answer = await scrape(addresses["public"])
        openmetrics = await scrape(addresses["public"], "application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("text/plain")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")
    found = samples(answer.text)
    assert all(name.startswith(PREFIX) for name, _ in found)
    assert found[PREFIX + "kv_blocks", (("state", "cached"),)] == 6
    total = sum(value for (name, _), value in found.items() if name == PREFIX + "kv_blocks")
    assert total == core.pool.total
    assert found[PREFIX + "step_age_seconds", ()] == 1.5
    assert found[PREFIX + "requests_admitted_total", ()] == 4
    assert found[PREFIX + "time_to_first_token_seconds_count", ()] == 4
    assert found[PREFIX + "inter_token_seconds_count", ()] == 8
    assert found[PREFIX + "request_seconds_count", ()] == 4
    route = ("route", "/v1/completions")
    assert found[PREFIX + "http_responses_total", (route, ("status", "200"))] == 2
    assert found[PREFIX + "http_responses_total", (route, ("status", "400"))] == 1
    assert found[PREFIX + "http_responses_total", (("route", "other"), ("status", "404"))] == 1


async def test_the_admin_side_tells_the_histograms_that_prometheus_reads(core: FakeCore, open_engine: Open) -> None:
    async with open_engine() as addresses, httpx.AsyncClient() as http:
        body = {"model": "fake", "prompt": "the quick fox", "max_tokens": 3}
        assert (await http.post(f"{addresses['public']}/v1/completions", json=body)).status_code == 200
        latency = (await http.get(f"{addresses['admin']}/admin/v1/kv")).json()["latency"]
        found = samples((await scrape(addresses["public"])).text)
    names = {
        "ttft": "time_to_first_token_seconds",
        "inter_token": "inter_token_seconds",
        "end_to_end": "request_seconds",
    }
    for told, name in names.items():
        read = {dict(labels)["le"]: count for (one, labels), count in found.items() if one == f"{PREFIX}{name}_bucket"}
        assert latency[told] == [[None if le == "+Inf" else float(le), count] for le, count in read.items()]
        assert latency[told][-1][1] > 0, told


def test_every_counter_of_the_snapshot_is_exported() -> None:
    assert set(COUNTERS) == {field.name for field in fields(Counters)}


def test_what_is_unknown_is_absent_and_comes_and_goes() -> None:
    class Core(FakeCore):
        def snapshot(self) -> Any:
            plain = super().snapshot()
            return replace(plain, host=TierState(total_bytes=9, used_bytes=4)) if self.hung else plain

    core = Core()
    registry, _ = make_registry(core)
    limit, tier = PREFIX + "admission_limit_prompt_tokens", {"tier": "host"}

    def read() -> tuple[float | None, float | None]:
        return registry.get_sample_value(limit), registry.get_sample_value(PREFIX + "kv_tier_used_bytes", tier)

    assert read() == (None, None)
    core.set_admission(AdmissionLimit(max_prompt_tokens=64, expires_at=math.inf))
    core.hung = True
    assert read() == (64, 4)
    core.set_admission(None)
    core.hung = False
    assert read() == (None, None)
