"""The agent and the operator stay light: importing their programs loads no engine and no torch."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "triton", "ullage_engine", "ullage_cli")
FORBIDDEN = {
    "ullage_agent.main": (*HEAVY, "ullage_operator", "kopf", "kubernetes", "pydantic"),
    "ullage_operator.main": HEAVY,
}


@pytest.mark.parametrize("program", sorted(FORBIDDEN))
def test_importing_a_program_loads_nothing_heavy(program: str) -> None:
    code = f"import sys, {program}; print('\\n'.join(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert program.partition(".")[0] in loaded
    assert loaded & set(FORBIDDEN[program]) == set()


def test_the_wire_types_load_nothing_but_msgspec() -> None:
    code = "import sys, ullage_agent.wire; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded & {"aiohttp", "prometheus_client"} == set()
    assert {name for name in done.stdout.split() if name.startswith("ullage_agent.")} == {"ullage_agent.wire"}
