"""Every command in README and docs is run, or says why not."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fences import RUNBOOK, Block, blocks, matches

pytestmark = pytest.mark.timeout(900)
"""A cluster or a model is started before the first of them, on machines that may be busy."""

LOCAL = [block for block in blocks() if block.kind == "local"]
AGENT = [block for block in blocks() if block.kind == "agent"]
MODEL = [block for kind in ("model", "after-model") for block in blocks() if block.kind == kind]
CLUSTER = [block for kind in ("cluster", "cluster-before-last") for block in blocks() if block.kind == kind]
PROPOSE = [block for block in blocks() if block.kind == "cluster-propose"]
LAST = [block for block in blocks() if block.kind == "cluster-last"]
RUNBOOKS = [block for block in blocks() if block.kind == RUNBOOK]
KINDS = {"local", "agent", "model", "after-model", "cluster", "cluster-before-last", "cluster-propose", "cluster-last"}

NOT_HERE = (
    (r"kubectl (-n \S+ )?(logs|exec|port-forward|cp)\b", "needs a node with a kubelet that serves logs and exec"),
    (r"kubectl (-n \S+ )?top pod", "needs a metrics server"),
    (r"nvidia-smi\b", "needs an NVIDIA GPU"),
    (r"kubectl (get|describe) (podmonitor|prometheusrule)", "needs the kinds of Prometheus Operator"),
    (r"kubectl (-n \S+ )?rollout\b", "needs a node for the operator's own pods"),
)
"""Commands in runbooks that cannot be run here, and why."""


def each(found: list[Block]) -> Any:
    """A test for each block, named by its place."""
    return pytest.mark.parametrize("block", found, ids=[block.name for block in found])


def test_every_block_is_run_or_says_why_not() -> None:
    unmarked = [block.name for block in blocks() if not block.kind and not block.reason]
    assert not unmarked, f"put <!-- run: KIND --> or <!-- not run: REASON --> above {unmarked}"
    odd = [f"{block.name}: {block.kind}" for block in blocks() if block.kind and block.kind not in KINDS | {RUNBOOK}]
    assert not odd


def test_there_is_something_to_run() -> None:
    assert len(LOCAL) >= 5 and len(CLUSTER) >= 6 and len(RUNBOOKS) >= 10 and MODEL and AGENT and PROPOSE and LAST


@each(LOCAL)
def test_commands_that_need_nothing(block: Block, shell: Any) -> None:
    check(block, shell.run(block.text))


@each(AGENT)
def test_commands_beside_a_server(block: Block, served: Any) -> None:
    shell, ports = served
    text = block.text
    for said, meant in ports.items():
        text = text.replace(said, meant)
    check(block, shell.run(text))


@pytest.mark.envtest
@each(CLUSTER)
def test_commands_on_a_cluster(block: Block, playground: Any) -> None:
    check(block, playground.shell.run(block.text))


@pytest.mark.envtest
@each(PROPOSE)
def test_commands_on_a_proposal(block: Block, proposed: Any) -> None:
    check(block, proposed.shell.run(block.text))


@pytest.mark.envtest
@each(RUNBOOKS)
def test_commands_of_runbooks(block: Block, playground: Any) -> None:
    for line in block.text.splitlines():
        if any(re.search(pattern, line) for pattern, _ in NOT_HERE):
            continue
        line = re.sub(r"\bNAME\b", "smollm2", line.replace("POD", playground.pod()))
        playground.shell.run(re.sub(r"custom-columns=smollm2:", "custom-columns=NAME:", line))


@pytest.mark.envtest
@each(LAST)
def test_commands_that_remove_everything(block: Block, playground: Any) -> None:
    playground.operator.stop()  # nothing of ours needs it in order to go
    check(block, playground.shell.run(block.text))
    assert "ullage" not in playground.kubectl.run("get", "crd", "-o", "name")
    assert not playground.kubectl.list("deployment")


@pytest.mark.model
@each(MODEL)
def test_commands_with_the_model(block: Block, modelled: Any) -> None:
    check(block, modelled.run(block.text, timeout_s=600))


def check(block: Block, printed: str) -> None:
    """Whether a block printed what the page says."""
    if block.output is not None:
        assert matches(block.output, printed), f"{block.name} says\n{block.output}\nand it prints\n{printed}"
