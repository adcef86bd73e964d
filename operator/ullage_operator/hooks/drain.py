"""drain FOLDER SECRETS PORT WAIT TIMEOUT: the agent is about to be stopped; if its engine is, too, drain that first.

The engine's own hook says so by a note in the folder that both share; without one the agent alone is restarted, and
nothing is drained. WAIT is the time until load balancers have dropped the pod. The token stays in this container.
"""

import http.client
import json
import os
import pathlib
import ssl
import sys
import time
from typing import Any

NOTE_S = 3.0
ASK_S = 10.0


def main(folder: pathlib.Path, agent: "Agent", wait_s: float, timeout_s: float) -> None:
    began, now = time.monotonic(), time.time()
    while not noted(folder / "leaving", now - NOTE_S):
        if time.monotonic() - began > NOTE_S:
            return
        time.sleep(0.1)
    (folder / "draining").touch()
    time.sleep(wait_s)
    while (left := began + timeout_s - time.monotonic()) > 1 and not agent.drained(left):
        time.sleep(0.5)
    (folder / "drained").touch()


def noted(note: pathlib.Path, since: float) -> bool:
    """Whether the note is of this end: one that a killed hook left behind says nothing."""
    try:
        return note.stat().st_mtime >= since
    except FileNotFoundError:
        return False


class Agent:
    """The agent of this pod, called as the operator calls it."""

    def __init__(self, secrets: pathlib.Path, port: int) -> None:
        self._secrets = secrets
        self._port = port
        self._sendings = 0

    def drained(self, left_s: float) -> bool:
        """Close admission and wait; whether nothing is in flight. An agent that is gone has nothing to wait for."""
        self._sendings += 1
        timeout_s = min(left_s, ASK_S)
        try:
            status, answer = self._call("POST", "/v1/actions/drain", timeout_s, {"timeout_s": timeout_s})
            if status == 200 and answer.get("outcome") == "Unsupported":
                return self._idle(timeout_s)
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError, http.client.HTTPException):
            return False
        return status == 200 and answer.get("outcome") == "Succeeded"

    def _idle(self, timeout_s: float) -> bool:
        """Nothing closes this engine's admission: wait until the load balancers' last requests have ended."""
        _, answer = self._call("GET", "/v1/risk", timeout_s)
        snapshot = answer.get("snapshot") or {}
        return not (snapshot.get("running") or snapshot.get("waiting"))

    def _call(self, method: str, path: str, timeout_s: float, body: Any = None) -> tuple[int, dict[str, Any]]:
        context = ssl.create_default_context(cafile=str(self._secrets / "ca.crt"))
        context.check_hostname = False  # only this service's agents have a key to that certificate
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=timeout_s + 5, context=context)
        headers = {
            "Authorization": f"Bearer {(self._secrets / 'token').read_text().strip()}",
            "Content-Type": "application/json",
            "Idempotency-Key": f"prestop-{os.getpid()}-{time.time_ns()}-{self._sendings}",
        }
        try:
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


if __name__ == "__main__":
    run, secrets, port, wait, timeout = sys.argv[1:6]
    main(pathlib.Path(run), Agent(pathlib.Path(secrets), int(port)), float(wait), float(timeout))
