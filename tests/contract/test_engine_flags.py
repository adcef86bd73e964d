"""What the operator tells our engine, the engine understands; both know the same words and the same defaults."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ullage_engine.config import EVICTION_POLICIES, NUMERICS, SPECULATIONS, EngineConfig
from ullage_engine.errors import ConfigError
from ullage_engine.main import parse_arguments
from ullage_engine.request import KvBudget
from ullage_operator.arguments import engine_arguments
from ullage_operator.errors import ManifestError
from ullage_operator.manifest import load_manifest, read_service
from ullage_operator.model import Engine, Eviction, InferenceService, Speculation

SAMPLES = sorted((Path(__file__).resolve().parents[2] / "manifests" / "samples").glob("*.yaml"))
SMALL = next(sample for sample in SAMPLES if sample.stem == "smollm2")


def understood(service: InferenceService) -> EngineConfig:
    return parse_arguments(engine_arguments(service, host="h", port=1, admin="unix:a"))[0]


def engine_with(**engine: Any) -> InferenceService:
    """The small sample with other settings; those of the cache are merged."""
    made: dict[str, Any] = copy.deepcopy(yaml.safe_load(SMALL.read_text()))
    cache = {**made["spec"]["engine"]["kvCache"], **engine.pop("kvCache", {})}
    made["spec"]["engine"] |= {**engine, "kvCache": cache}
    return read_service(made)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda p: p.stem)
def test_samples_start_the_engine(sample: Path) -> None:
    service = load_manifest(sample)
    if service.spec.engine.type == "ullage":
        assert understood(service).model == service.spec.model.source


def test_everything_that_is_said_arrives() -> None:
    config = understood(
        engine_with(
            numerics="invariant",
            speculation={"method": "draft", "draftModel": "/models/tinier", "tokens": 3},
            kvCache={
                "hostMemory": "1Gi",
                "eviction": {
                    "budget": "30%",
                    "policy": "window",
                    "interval": 64,
                    "protectedTokens": 16,
                    "recentTokens": 32,
                },
            },
        )
    )
    assert (config.numerics, config.host_memory) == ("invariant", 2**30)
    assert (config.speculation, config.draft_model, config.speculation_tokens) == ("draft", "/models/tinier", 3)
    assert (config.kv_budget, config.eviction_policy) == (KvBudget(share=0.3), "window")
    assert (config.evict_interval, config.protected_tokens, config.recent_tokens) == (64, 16, 32)


def test_what_is_not_said_is_the_engine_s_own() -> None:
    service = engine_with(kvCache={"eviction": {}})
    own = EngineConfig(model=service.spec.model.source)
    config = understood(service)
    names = ("numerics", "speculation", "draft_model", "speculation_tokens", "kv_budget", "eviction_policy")
    names += ("evict_interval", "protected_tokens", "recent_tokens", "disk_dir", "kernels")
    assert {n: getattr(config, n) for n in names} == {n: getattr(own, n) for n in names}


def words(model: Any, field: str) -> set[str]:
    """Values of a field that is a choice, which may be absent."""
    annotation = model.model_fields[field].annotation
    return {word for part in (annotation, *get_args(annotation)) for word in get_args(part) if isinstance(word, str)}


def test_both_know_the_same_words() -> None:
    assert words(Eviction, "policy") == set(EVICTION_POLICIES)
    assert words(Engine, "numerics") == set(NUMERICS)
    assert words(Speculation, "method") == set(SPECULATIONS) - {"off"}


@given(text=st.from_regex(r"[0-9]{0,4}(\.[0-9]{1,2})?%?", fullmatch=True))
def test_budgets_are_admitted_where_the_engine_takes_them(text: str) -> None:
    """Bare fractions and leading zeros, which the engine takes too, are not admitted: they are not written twice."""
    try:
        config = understood(engine_with(kvCache={"eviction": {"budget": text}}))
    except ManifestError:
        plain = text.removesuffix("%")
        if plain and not plain.startswith(("0", ".")) and ("%" in text or "." not in text):
            with pytest.raises(ConfigError):
                parse_arguments(["--model=m", f"--kv-budget={text}"])
        return
    assert config.kv_budget == parse_arguments(["--model=m", f"--kv-budget={text}"])[0].kv_budget
