"""Engine adapters by name. The registry is data: programs pass it on, tests pass their own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ullage_agent.adapters.base import AdapterConfig, AdapterFactory, EngineAdapter, Reading
from ullage_agent.adapters.fake import FakeAdapter
from ullage_agent.adapters.sglang import make_adapter as make_sglang
from ullage_agent.adapters.ullage import UllageAdapter
from ullage_agent.adapters.vllm import make_adapter as make_vllm

BUILTIN_ADAPTERS: Mapping[str, AdapterFactory] = MappingProxyType(
    {
        "ullage": UllageAdapter.from_config,
        "fake": FakeAdapter.from_config,
        "vllm": make_vllm,
        "sglang": make_sglang,
    }
)
"""Values of `--engine`."""

__all__ = ["BUILTIN_ADAPTERS", "AdapterConfig", "AdapterFactory", "EngineAdapter", "Reading"]
