"""Shell completion in real bash, the scripts of the other shells, and kubectl's protocol for plugins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ullage_cli.commands import run
from ullage_cli.completion import starting

BIN = Path(sys.executable).parent
PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"


def bash(typed: str) -> list[str]:
    """What bash offers for a line that ends at the cursor."""
    program = f"""
        source <(ullage completion bash)
        COMP_WORDS=({typed}); [[ {typed!r} == *" " ]] && COMP_WORDS+=("")
        COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        _ullage_completion ullage
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    command = ["bash", "--norc", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": PATH})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("ullage pl", ["plan"]),
        ("ullage plan --gpu H100", ["H100-PCIe", "H100-SXM", "H100-NVL"]),
        ("ullage plan llama-3", ["llama-3-8b", "llama-3-70b"]),
        ("ullage top --loc", ["--local"]),
    ],
)
def test_bash_completes(typed: str, expected: list[str]) -> None:
    assert bash(typed) == expected


def test_names_of_records_are_completed(tmp_path: Path) -> None:
    folder = tmp_path / "web" / "remediations"
    folder.mkdir(parents=True)
    for name in ("web-evict-1", "web-throttle-2"):
        (folder / f"{name}.yaml").touch()
    assert bash(f"ullage explain --local --state-dir {tmp_path} web-e") == ["web-evict-1"]


def test_no_cluster_no_names(tmp_path: Path) -> None:
    assert bash(f"ullage explain --kubeconfig {tmp_path}/none w") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_printed_and_parse(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "_ULLAGE_COMPLETE" in text and f"complete_{shell}" in text
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=text, text=True, capture_output=True, timeout=60)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes() -> None:
    offered = program("fish", "-c", 'ullage completion fish | source; complete -C "ullage plan --gpu H100-P"').stdout
    assert offered.split() == ["H100-PCIe"]


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_knows_the_completion(tmp_path: Path) -> None:
    text = (
        f"autoload -U compinit; compinit -u -d {tmp_path}/dump; source <(ullage completion zsh); print $_comps[ullage]"
    )
    assert program("zsh", "-f", "-c", text).stdout.strip() == "_ullage_completion"


def test_other_shells_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "csh"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def program(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": PATH})


def test_kubectl_finds_the_plugin_and_names_itself_in_the_help() -> None:
    assert program("kubectl", "ullage", "version").stdout.strip()
    assert "kubectl ullage plan" in program("kubectl", "ullage", "plan", "--help").stdout


def test_kubectl_completes_the_plugin() -> None:
    offered = program("kubectl", "__complete", "ullage", "pl").stdout.split()
    assert offered[:1] == ["plan"]
    assert program("kubectl_complete-ullage", "plan", "--gpu", "L4").stdout.split() == ["L4", "L40S", ":0"]


def test_fixed_words() -> None:
    assert starting(("a1", "b", "a2"))("a") == ["a1", "a2"]
