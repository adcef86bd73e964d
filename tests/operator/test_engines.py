"""One spec, three engines: mapped to their arguments, refused with the reason where they cannot."""

from __future__ import annotations

from typing import Any

import pytest

from ullage_operator.arguments import engine_arguments, engine_command
from ullage_operator.desired import Images
from ullage_operator.errors import ManifestError
from ullage_operator.manifest import read_service
from ullage_operator.pods import pod_template, worker_template

SHARE = {"memory": None, "memoryShare": 0.85}


def manifest(build: Any, *, cache: dict[str, Any] | None = None, limits: Any = None, **engine: Any) -> dict[str, Any]:
    made: dict[str, Any] = build.manifest()
    own = made["spec"]["engine"]
    own |= {**engine, **({"resources": {"limits": limits}} if limits else {})}
    own["kvCache"] = {k: v for k, v in {**own["kvCache"], **(cache or {})}.items() if v is not None}
    return made


def arguments(build: Any, **changes: Any) -> list[str]:
    service = read_service(manifest(build, **changes))
    return engine_arguments(service, host="0.0.0.0", port=8000, admin="unix:/a")


def test_vllm(build: Any) -> None:
    made = arguments(
        build,
        type="vllm",
        image="vllm:1",
        dtype="bfloat16",
        tensorParallel=2,
        speculation={"tokens": 3},
        cache={"memory": "8Gi", "hostMemory": "16Gi", "blockSize": 32},
        limits={"memory": "32Gi", "nvidia.com/gpu": "2"},
        extraArgs=["--enforce-eager"],
    )
    assert made == [
        "/models/tiny",
        "--served-model-name=web",
        f"--kv-cache-memory-bytes={8 * 2**30}",
        "--kv-cache-dtype=fp8",
        "--block-size=32",
        "--max-num-batched-tokens=512",
        "--max-num-seqs=64",
        "--dtype=bfloat16",
        "--tensor-parallel-size=2",
        "--enable-prefix-caching",
        "--kv-offloading-size=16",
        "--kv-offloading-backend=native",
        '--speculative-config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3}',
        "--middleware=ullage_agent.gate.AdmissionGate",
        "--host=0.0.0.0",
        "--port=8000",
        "--enforce-eager",
    ]


def test_sglang(build: Any) -> None:
    made = arguments(
        build,
        type="sglang",
        image="sglang:1",
        nodes=2,
        tensorParallel=8,
        speculation={"tokens": 3},
        cache={**SHARE, "type": "bf16", "hostMemory": "20G", "prefixReuse": False},
    )
    assert made == [
        "--model-path=/models/tiny",
        "--served-model-name=web",
        "--mem-fraction-static=0.85",
        "--kv-cache-dtype=bfloat16",
        "--page-size=16",
        "--chunked-prefill-size=512",
        "--max-running-requests=64",
        "--dtype=auto",
        "--tp-size=8",
        "--disable-radix-cache",
        "--enable-hierarchical-cache",
        "--hicache-size=5",
        "--speculative-algorithm=NGRAM",
        "--speculative-num-draft-tokens=3",
        "--enable-metrics",
        "--nnodes=$(LWS_GROUP_SIZE)",
        "--node-rank=$(LWS_WORKER_INDEX)",
        "--dist-init-addr=$(LWS_LEADER_ADDRESS):20000",
        "--host=0.0.0.0",
        "--port=8000",
    ]


def test_a_tier_on_several_nodes_is_told_as_each_engine_counts_it(build: Any) -> None:
    """`hostMemory` is one pod's: vLLM wants the sum over all ranks, SGLang (above) the share of one."""
    made = arguments(build, type="vllm", image="v", nodes=2, tensorParallel=8, cache={"hostMemory": "16Gi"})
    assert "--kv-offloading-size=32" in made


def test_only_the_first_of_vllm_s_pods_serves_an_api(build: Any) -> None:
    changes = {"nodes": 2, "tensorParallel": 2}
    for kind, cache, words in (("vllm", {}, ["--headless"]), ("sglang", SHARE, [])):
        service = read_service(manifest(build, type=kind, image="i", cache=cache, **changes))
        images = Images(engine="e", agent="a")
        first = pod_template(service, images)["spec"]["containers"][0]
        (other,) = worker_template(service, images)["spec"]["containers"]
        assert other["args"] == [*first["args"], *words]
        assert "lifecycle" not in other


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"type": "vllm"}, "spec.engine.image: is missing; name an image of vllm"),
        (
            {"speculation": {"method": "draft"}},
            "spec.engine.speculation.draftModel: is missing; name a smaller model with the same tokens",
        ),
        (
            {"speculation": {"draftModel": "/models/tinier"}},
            "spec.engine.speculation.draftModel: '/models/tinier' is set beside method ngram; set method draft",
        ),
        (
            {"type": "vllm", "image": "v", "speculation": {"method": "draft", "draftModel": "d"}},
            "spec.engine.speculation.method: 'draft' is for engine type ullage, not vllm; set ngram",
        ),
        (
            {"type": "sglang", "image": "s", "cache": SHARE, "numerics": "invariant"},
            "spec.engine.numerics: 'invariant' is set, but sglang has no such setting; leave it out",
        ),
        *(
            (
                {"cache": {"eviction": {"budget": budget}}},
                f"spec.engine.kvCache.eviction.budget: {budget!r} is no budget; write tokens from 2 on",
            )
            for budget in ("", "0", "1", "-5", "2.5", "0%", "0.0%", "101%", "100.1%", "30 %", "all", "02", "2048\n")
        ),
        (
            {"cache": {"eviction": {"budget": 2048}}},
            'spec.engine.kvCache.eviction.budget: 2048 is a number; write it in quotes, "2048"',
        ),
        ({"cache": {"eviction": {"policy": "lru"}}}, "spec.engine.kvCache.eviction.policy"),
        ({"cache": {"eviction": {"interval": 0}}}, "spec.engine.kvCache.eviction.interval"),
        *(
            (
                {**other, "cache": {**cache, "eviction": {"budget": "30%"}}},
                f"spec.engine.kvCache.eviction.budget: '30%' is set, but {other['type']} cannot evict from running",
            )
            for other, cache in (
                ({"type": "vllm", "image": "v"}, {}),
                ({"type": "sglang", "image": "s"}, SHARE),
            )
        ),
        (
            {"type": "vllm", "image": "v", "cache": {"eviction": {"policy": "window"}}},
            "spec.engine.kvCache.eviction: is set, but vllm cannot evict from running sequences",
        ),
        (
            {"tensorParallel": 2},
            "spec.engine.tensorParallel: 2 is asked for, but engine type ullage runs on one device",
        ),
        ({"nodes": 2}, "spec.engine.nodes: 2 is asked for"),
        (
            {"cache": {"hostMemory": "1Gi"}, "limits": {"memory": "1Gi"}},
            "spec.engine.kvCache.hostMemory: '1Gi' does not fit under resources.limits.memory 1Gi",
        ),
        (
            {"cache": {"memory": "1Gi", "hostMemory": "1Gi"}, "limits": {"memory": "2Gi"}},
            "spec.engine.kvCache.memory: '1Gi' beside hostMemory 1Gi does not fit under resources.limits.memory 2Gi",
        ),
        ({"cache": SHARE}, "spec.engine.kvCache.memoryShare: 0.85 is asked for"),
        ({"cache": {"memory": None}}, "spec.engine.kvCache.memory: is missing"),
        ({"cache": {"memoryShare": 0.5}}, "spec.engine.kvCache.memoryShare: 0.5 is set beside memory 48Mi"),
        (
            {"type": "vllm", "image": "v", "cache": {"blockSize": 8}},
            "spec.engine.kvCache.blockSize: 8 is not offered by vllm; set 16 or 32",
        ),
        ({"type": "vllm", "image": "v", "threads": 4}, "spec.engine.threads: 4 is set, but vllm has no such setting"),
        ({"type": "vllm", "image": "v", "cache": {"type": "int8"}}, "spec.engine.kvCache.type: 'int8' is not offered"),
        (
            {"type": "sglang", "image": "s", "cache": {**SHARE, "eviction": {"recentTokens": 1}}},
            "spec.engine.kvCache.eviction: is set, but sglang cannot evict from running sequences",
        ),
        (
            {"type": "sglang", "image": "s"},
            "spec.engine.kvCache.memory: '48Mi' is set, but sglang sizes its pool by share",
        ),
        (
            {"type": "vllm", "image": "v", "cache": {"hostMemory": "64Gi"}, "limits": {"memory": "32Gi"}},
            "spec.engine.kvCache.hostMemory: '64Gi' does not fit under resources.limits.memory 32Gi",
        ),
        (
            {"cache": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}},
            "spec.engine.kvCache.memory: '2Gi' does not fit under resources.limits.memory 1Gi",
        ),
        (
            {"type": "vllm", "image": "v", "tensorParallel": 4, "limits": {"nvidia.com/gpu": "2"}},
            "spec.engine.tensorParallel: 4 is above the 2 accelerators of an engine",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_the_reason(build: Any, changes: Any, complaint: str) -> None:
    with pytest.raises(ManifestError) as caught:
        read_service(manifest(build, **changes))
    assert complaint in str(caught.value)


def test_device_memory_is_not_main_memory(build: Any) -> None:
    read_service(manifest(build, cache={"memory": "24Gi"}, limits={"memory": "8Gi", "nvidia.com/gpu": "1"}))


def test_pods_of_other_engines(build: Any) -> None:
    for kind, cache in (("vllm", {}), ("sglang", SHARE)):
        service = read_service(manifest(build, type=kind, image=f"{kind}:1", cache=cache, gpuSharing="Shared"))
        template = pod_template(service, Images(engine="e", agent="a"))
        engine, agent = template["spec"]["containers"]
        assert engine["command"] == engine_command(service)
        assert engine["image"] == f"{kind}:1"
        assert engine["readinessProbe"]["httpGet"]["path"] == "/health"
        assert "--engine-url=http://127.0.0.1:8000" in agent["args"]
        assert engine["lifecycle"]["preStop"]["exec"]["command"][-1] == "http://127.0.0.1:8000/metrics"
        assert agent["lifecycle"]["preStop"]["exec"]["command"][0] == "python3"
        assert template["metadata"]["labels"]["ullage.dev/gpu-sharing"] == "shared"
        gated = [c["name"] for c in template["spec"].get("initContainers", [])] == ["gate"]
        assert gated == (kind == "vllm")
        assert ("--gate-file=/run/ullage/gate.json" in agent["args"]) == gated
        mounts = {m["name"] for c in (engine, agent) for m in c["volumeMounts"]}
        assert mounts == {v["name"] for v in template["spec"]["volumes"]}
