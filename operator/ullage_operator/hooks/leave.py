"""leave FOLDER TIMEOUT METRICS: the engine is about to be stopped; hold that up until nothing is in flight.

Puts a note into the folder that it shares with the agent's hook and waits for its answer. Where no hook answers (the
engine alone is restarted, or the agent is gone), it waits by the engine's own metrics; without those, not at all.
"""

import pathlib
import re
import sys
import time
import urllib.request

UNANSWERED_S = 5.0
IN_FLIGHT = r"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs)(?:{[^}]*})? (\S+)"


def main(folder: pathlib.Path, timeout_s: float, metrics: str) -> None:
    began = time.monotonic()
    leaving, draining, drained = (folder / name for name in ("leaving", "draining", "drained"))
    for note in (draining, drained):
        note.unlink(missing_ok=True)
    leaving.touch()
    while time.monotonic() - began < timeout_s and not drained.exists():
        if time.monotonic() - began > UNANSWERED_S and not draining.exists():
            wait_alone(metrics, began + timeout_s)
            break
        time.sleep(0.2)
    leaving.unlink(missing_ok=True)


def wait_alone(metrics: str, end: float) -> None:
    """Until the engine's metrics say that nothing is in flight, or no more say anything."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < end:
        try:
            with opener.open(metrics, timeout=5) as answer:
                counts = re.findall(IN_FLIGHT, answer.read().decode(), re.MULTILINE)
        except (OSError, ValueError):
            return
        if not any(float(count) for count in counts):
            return
        time.sleep(1)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
