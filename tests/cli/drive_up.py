"""`ullage up` with the stub engine: `python drive_up.py BEHAVIOUR MANIFEST STATE [--demo-load] [--short]
[--broken=METHOD]`.

Begins as the program does and says so by a line `begun`. With `--broken` that method of the screen raises.
"""

from __future__ import annotations

import sys

from ullage_cli.main import end_at_once_when_interrupted


def main(behaviour: str, manifest: str, state: str, *flags: str) -> int:
    end_at_once_when_interrupted()
    print("begun", flush=True)
    import asyncio
    from pathlib import Path
    from typing import NoReturn

    from ullage_cli.commands import conclude, reporting, run_up
    from ullage_cli.launch import Programs, installed_programs
    from ullage_cli.pace import LoadPlan
    from ullage_cli.screen import PlainScreen
    from ullage_cli.up import UpOptions, up

    def broken(*_: object) -> NoReturn:
        raise ValueError("broken\non purpose")

    methods = {flag.removeprefix("--broken="): broken for flag in flags if flag.startswith("--broken=")}
    stub = Path(__file__).with_name("stub_engine.py")
    options = UpOptions(
        manifest=Path(manifest),
        state_dir=Path(state),
        demo_load="--demo-load" in flags,
        duration_s=1.0 if "--short" in flags else None,
        programs=Programs(engine=(sys.executable, str(stub), behaviour), agent=installed_programs().agent),
        plan=LoadPlan(warm_up_chats=2, short_tokens=8, long_tokens=(96, 96), ramp_s=30.0, hold_s=10.0, total_s=60.0),
    )
    if not methods:
        return reporting(lambda: run_up(options, plain=True))
    screen = type("Screen", (PlainScreen,), methods)()
    return reporting(lambda: conclude(asyncio.run(up(options, screen)), to_the_end=options.demo_load))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
