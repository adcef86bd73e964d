"""The operator with a death sentence, for tests: `python -m mortal N ARGUMENTS…` kills itself (as kill -9 would) right
after the N-th thing it wrote, to the API server or to an agent. Events and leases do not count.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from ullage_operator import gather, kube, main

lives = int(sys.argv.pop(1))


def _spend() -> None:
    global lives  # one process, one count
    lives -= 1
    if lives <= 0:
        os.kill(os.getpid(), signal.SIGKILL)


_call, _act = kube.Cluster._call, gather.AgentClient.act


async def call(self: kube.Cluster, method: str, path: str, *rest: Any, **named: Any) -> Any:
    answer = await _call(self, method, path, *rest, **named)
    if method != "GET" and not path.endswith("/events") and "/leases" not in path:
        _spend()
    return answer


async def act(self: gather.AgentClient, *rest: Any, **named: Any) -> Any:
    result = await _act(self, *rest, **named)
    _spend()
    return result


kube.Cluster._call = call  # type: ignore[method-assign]
gather.AgentClient.act = act  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main.main())
