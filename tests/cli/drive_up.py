"""`ullage up` with the stub engine: `python drive_up.py BEHAVIOUR MANIFEST STATE [--demo-load] [--short]`.

Begins as the program does and says so by a line `begun`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ullage_cli.main import end_at_once_when_interrupted

STUB = Path(__file__).with_name("stub_engine.py")


def main(behaviour: str, manifest: str, state: str, *flags: str) -> int:
    end_at_once_when_interrupted()
    print("begun", flush=True)
    from ullage_cli.commands import reporting, run_up
    from ullage_cli.launch import Programs, installed_programs
    from ullage_cli.pace import LoadPlan
    from ullage_cli.up import UpOptions

    options = UpOptions(
        manifest=Path(manifest),
        state_dir=Path(state),
        demo_load="--demo-load" in flags,
        duration_s=1.0 if "--short" in flags else None,
        programs=Programs(engine=(sys.executable, str(STUB), behaviour), agent=installed_programs().agent),
        plan=LoadPlan(warm_up_chats=2, short_tokens=8, long_tokens=(96, 96), ramp_s=30.0, hold_s=10.0, total_s=60.0),
    )
    return reporting(lambda: run_up(options, plain=True))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
