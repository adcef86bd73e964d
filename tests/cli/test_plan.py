"""`ullage plan`: shapes, sums, the published example, words, picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ullage_cli.commands import run
from ullage_cli.errors import InputError
from ullage_cli.plan import planning, report
from ullage_cli.plan.asking import Asked, parse_size, request_of
from ullage_cli.plan.machines import GPUS, find_gpu
from ullage_cli.plan.picture import picture
from ullage_cli.plan.shape import KNOWN, from_config, read_model
from ullage_cli.plan.sums import CACHES, Blocks, Pace, sequence_bytes, token_bytes

LLAMA = from_config(KNOWN["llama-3-8b"], "llama-3-8b")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON document of a plan."""
    status = run(["plan", *words, "--output", "json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document | {"status": status}


def test_the_published_example(capsys: pytest.CaptureFixture[str]) -> None:
    document = told(capsys, "--example")
    wide, narrow = document["caches"][:2]
    assert (wide["maxSequences"], narrow["maxSequences"]) == (59, 119)
    assert round(wide["dollarsPerMillionTokens"], 3) == 0.028
    assert round(narrow["dollarsPerMillionTokens"], 3) == 0.013
    assert round(100 * (narrow["dollarsPerMillionTokens"] / wide["dollarsPerMillionTokens"] - 1)) == -54
    assert document["model"]["kvHeads"] == 32


def test_the_examples_assumptions_are_named_and_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--example"]) == 0
    words = capsys.readouterr().out
    assert "llama-3-8b has 8 for its 32 query heads (GQA)" in words
    assert "linear batching" in words
    ladder = told(capsys, "--example")["corrected"]
    counts = [[cache["maxSequences"] for cache in step["caches"]] for step in ladder]
    assert counts[1] == [238, 476]  # four times fewer heads
    assert counts[2][0] == 238 and counts[2][1] == int(476 / (1 + 4 / 128))
    costs = [[cache["dollarsPerMillionTokens"] for cache in step["caches"]] for step in ladder]
    # weights and cache read once at 2,039 GB/s take ten times longer than the example's step
    assert costs[-1][0] > 10 * costs[-2][0]


def test_the_floor_is_reading_weights_and_cache_once() -> None:
    wide = planning.make_plan(planning.example()).fits[0]
    assert wide.floor_s == pytest.approx((2 * LLAMA.parameters + 59 * (1 << 30)) / 2039e9)


@pytest.mark.parametrize(
    ("name", "parameters", "sharing"),
    [
        ("llama-3-8b", 8_030_261_248, "GQA"),
        ("llama-3-70b", 70_553_706_496, "GQA"),
        ("llama-2-7b", 6_738_415_616, "MHA"),
        ("smollm2-135m", 134_515_008, "GQA"),
    ],
)
def test_parameters_of_known_models(name: str, parameters: int, sharing: str) -> None:
    shape = read_model(name)
    assert (shape.parameters, shape.sharing) == (parameters, sharing)


def test_kv_bytes_of_mha_gqa_and_mqa() -> None:
    def per_token(kv_heads: int) -> float:
        shape = from_config(dict(KNOWN["llama-3-8b"], num_key_value_heads=kv_heads), "x")
        return token_bytes(shape, CACHES[0], Blocks())

    assert [per_token(heads) for heads in (32, 8, 1)] == [524288, 131072, 16384]


def test_mixtral_counts_all_experts() -> None:
    config = dict(KNOWN["mistral-7b"], vocab_size=32000, num_local_experts=8)
    assert from_config(config, "mixtral").parameters == pytest.approx(46.7e9, rel=0.002)


def test_compressed_keys_and_values_are_counted_once_a_layer() -> None:
    config = dict(KNOWN["llama-3-8b"], kv_lora_rank=512, qk_rope_head_dim=64)
    shape = from_config(config, "mla")
    assert shape.sharing == "MLA"
    assert token_bytes(shape, CACHES[0], Blocks()) == 32 * 576 * 2


def test_layers_without_a_cache_are_not_counted() -> None:
    kinds = ["linear_attention"] * 24 + ["full_attention"] * 8
    shape = from_config(dict(KNOWN["llama-3-8b"], layer_types=kinds), "hybrid")
    assert token_bytes(shape, CACHES[0], Blocks()) == 131072 / 4


def test_a_language_model_inside_another_is_found() -> None:
    assert from_config({"text_config": KNOWN["llama-3-8b"]}, "vlm").layers == 32


def test_sequences_take_whole_blocks_of_what_is_kept() -> None:
    block = 16 * token_bytes(LLAMA, CACHES[0], Blocks())
    assert sequence_bytes(LLAMA, CACHES[0], Blocks(), 17) == 2 * block
    budget = planning.caches(0.2)[-1]
    assert sequence_bytes(LLAMA, budget, Blocks(scale_group=0), 2048) == 26 * block / 2  # 410 tokens


def test_a_folder_tells_the_weights_by_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["smollm2-135m"]))
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 500)
    assert told(capsys, str(tmp_path), "--gpu", "l4")["model"]["weightBytes"] == 1500
    assert told(capsys, str(tmp_path), "--gpu", "l4", "--weights", "int8")["model"]["weightBytes"] == 134_515_008


def test_what_does_not_fit_says_what_is_lacking(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama-3-70b", "--gpu", "A100-80GB"]) == 1
    words = capsys.readouterr().out
    assert " 0 " in words
    document = told(capsys, "llama-3-70b", "--gpu", "A100-80GB", "--concurrency", "4")
    assert document["status"] == 1
    assert document["caches"][0]["lackingBytes"] > 70e9
    assert told(capsys, "llama-3-70b", "--gpu", "A100-80GB", "--gpus", "4")["status"] == 0


def test_some_caches_fit_and_others_lack(capsys: pytest.CaptureFixture[str]) -> None:
    document = told(capsys, "llama-3-8b", "--gpu", "A100-80GB", "--concurrency", "300")
    assert [cache["fits"] for cache in document["caches"]] == [False, True, True, True]
    assert document["caches"][0]["dollarsPerMillionTokens"] is None
    assert document["status"] == 0


def test_heads_are_copied_where_accelerators_outnumber_them() -> None:
    request = request_of(Asked(model="qwen2.5-7b", gpu="L4", gpus=8), measured=False)
    plan = planning.make_plan(request)
    assert plan.fits[0].sequence_bytes == 2 * sequence_bytes(plan.shape, CACHES[0], Blocks(), 2048)
    assert any("copied 2 times" in note for note in plan.notes)


def test_a_shape_by_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--layers",
        "32",
        "--heads",
        "32",
        "--kv-heads",
        "8",
        "--hidden",
        "4096",
        "--intermediate",
        "14336",
        "--vocabulary",
        "128256",
    ]
    by_flags = told(capsys, *flags, "--memory", "80GB")
    by_name = told(capsys, "llama-3-8b", "--memory", "80GB")
    assert by_flags["caches"] == by_name["caches"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere", "--gpu", "L4"], "MODEL: nowhere: No such file"),
        (["--gpu", "L4"], "MODEL: none was given"),
        (["llama-3-8b"], "--gpu: say what the model runs on"),
        (["llama-3-8b", "--gpu", "TPU"], "'TPU' is not in the table"),
        (["llama-3-8b", "--memory", "many"], "'many' is not a size"),
        (["llama-3-8b", "--gpu", "L4", "--weights", "fp7"], "'fp7' is not one of"),
        (["llama-3-8b", "--gpu", "L4", "--kv-heads", "5"], "do not divide"),
        (["llama-3-8b", "--gpu", "L4", "--step-ms", "0"], "not above 0"),
        (["llama-3-8b", "--gpu", "L4", "--parameters", "-1"], "--parameters"),
        (["llama-3-8b", "--layers", "3", "--gpu", "L4"], "MODEL says them"),
        (["--example", "llama-3-8b"], "--example"),
    ],
)
def test_bad_input_is_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert complaint in said


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"hidden_size": 1}, "no num_hidden_layers"),
        (dict(KNOWN["llama-3-8b"], num_key_value_heads=5), "evenly"),
        (dict(KNOWN["llama-3-8b"], hidden_size="big"), "not a whole number"),
    ],
)
def test_configs_that_make_no_sense(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        from_config(config, "x")


def test_sizes() -> None:
    assert parse_size("80GB", "-") == 80 * 10**9
    assert parse_size("24 GiB", "-") == 24 << 30
    assert parse_size("1.5Ti", "-") == 3 << 39


def test_every_accelerator_has_memory_and_bandwidth() -> None:
    assert find_gpu("a100-80gb").memory_bytes == 80 * 10**9
    assert all(gpu.bandwidth and gpu.memory_bytes >= 16e9 for gpu in GPUS.values())


def test_without_a_pace_the_bound_is_called_a_bound() -> None:
    plan = planning.make_plan(
        request_of(Asked(model="llama-3-8b", gpu="L4", price=1.0, weights="int8"), measured=False)
    )
    assert plan.fits[0].step_s == plan.fits[0].floor_s
    assert any("bound from below" in note for note in plan.notes)


def test_a_measured_pace_and_size_replace_what_was_assumed() -> None:
    measured = {"fp8": planning.Measured(pace=Pace(base=0.01, each=0.001), token_bytes=70_000.0)}
    plan = planning.make_plan(request_of(Asked(model="llama-3-8b", gpu="A100-80GB"), measured=False), measured)
    fp8, budget = plan.fits[1], plan.fits[3]
    assert fp8.token_bytes == budget.token_bytes == 70_000
    assert fp8.step_s == pytest.approx(0.01 + 0.001 * fp8.sequences)
    assert plan.fits[0].token_bytes == 131072


def test_the_picture_has_a_curve_for_each_cache_and_is_xml() -> None:
    plan = planning.make_plan(planning.example())
    drawing = ElementTree.fromstring(picture(plan))
    paths = drawing.findall("{http://www.w3.org/2000/svg}path")
    assert len(paths) == len(plan.fits)
    assert len({path.get("stroke-dasharray") for path in paths}) == len(paths)


def test_a_picture_that_cannot_be_written_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["plan", "--example", "--plot", str(tmp_path / "no" / "plan.svg")]) == 2
    assert "--plot" in capsys.readouterr().err


def test_the_table_lines_up() -> None:
    table = report.text(planning.make_plan(planning.example())).split("\n\n")[1]
    header, *rows = table.splitlines()
    assert all(len(row) == len(header) or row.startswith("fp16") for row in rows)
