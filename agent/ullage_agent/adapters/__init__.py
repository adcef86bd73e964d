"""Engine adapters by name. The registry is data: programs pass it on, tests pass their own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ullage_agent.adapters.base import AdapterConfig, AdapterFactory, EngineAdapter, Reading
from ullage_agent.adapters.fake import FakeAdapter
from ullage_agent.adapters.ullage import UllageAdapter
from ullage_agent.adapters.vllm import VllmAdapter

BUILTIN_ADAPTERS: Mapping[str, AdapterFactory] = MappingProxyType(
    {
        "ullage": UllageAdapter.from_config,
        "fake": FakeAdapter.from_config,
        "vllm": VllmAdapter.from_config,
    }
)
"""Values of `--engine`."""

__all__ = ["BUILTIN_ADAPTERS", "AdapterConfig", "AdapterFactory", "EngineAdapter", "Reading"]
