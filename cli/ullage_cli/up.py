"""`ullage up`: an InferenceService on this machine, with the operator's own policy acting on it.

The same manifest, agents and decisions as in a cluster, with processes in place of pods and files in place of
objects. Not a cluster: it restarts nothing, scales nothing and serves this machine alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from ullage_operator import certificates
from ullage_operator.gather import AgentClient
from ullage_operator.model import InferenceService
from ullage_operator.sweep import Sweeper

from . import front
from .board import Board
from .chat import ChatClient
from .diary import Diary
from .launch import (
    Launcher,
    Places,
    Programs,
    RunningReplica,
    installed_programs,
    make_credentials,
)
from .load import DemoLoad
from .pace import LoadPlan
from .preflight import HOST, check_machine, port_taken, read_manifest
from .processes import Supervisor
from .records import RecordFolder
from .running import announced
from .scratch import scratch_folder, state_folder
from .screen import Screen
from .session import Ending, Session
from .stopping import Stopped, StopSignals


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What the command line asked for."""

    manifest: Path
    demo_load: bool = False
    state_dir: Path | None = None
    """Records and logs; None: `.ullage/NAME` in the current folder."""
    duration_s: float | None = None
    """None: until the demo load is done, or for ever."""
    programs: Programs = field(default_factory=installed_programs)
    plan: LoadPlan = field(default_factory=LoadPlan)


async def up(options: UpOptions, screen: Screen) -> Ending:
    """Check everything, start everything, run to the end; leaves no process and no socket behind.

    Raises:
        InputError: what was given cannot work; nothing was left running.
        BrokenLoop: a part died before the service was up, or broke in a way that nobody foresaw.
    """
    service = read_manifest(options.manifest)
    check_machine(service)
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        state = stack.enter_context(state_folder(options.state_dir or Path(".ullage") / service.metadata.name))
        diary = stack.enter_context(Diary(state / "logs" / "ullage.log"))
        records = RecordFolder(state / "remediations")
        records.open()
        screen = stack.enter_context(screen)
        scratch = stack.enter_context(scratch_folder())
        supervisor = await stack.enter_async_context(Supervisor())
        stack.callback(screen.note, "stopping")
        stop.on_second(supervisor.kill)
        credentials = make_credentials(service)
        places = Places(scratch=scratch, logs=state / "logs")
        launcher = Launcher(service, supervisor, places, options.programs, credentials, _progress(screen))
        try:
            replicas = await stop.or_finish(launcher.launch())
        except Stopped:
            return Ending(interrupted=True)
        url = await _address(service, replicas, stack)
        _announce(screen, url, replicas)
        stack.enter_context(announced(state, service, [(replica.name, replica.metrics_url) for replica in replicas]))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        agents = AgentClient(http, credentials.token, certificates.client_context(credentials))
        board = Board(pod_uids=[replica.target.uid for replica in replicas])
        session = Session(
            service=service,
            url=url,
            targets=[replica.target for replica in replicas],
            sweeper=Sweeper(service=service, agents=agents, records=records, clock=time.time),
            records=records,
            diary=diary,
            supervisor=supervisor,
            board=board,
            screen=screen,
            stop=stop,
            load=_load(service, options, ChatClient(http, url, service.served_name), board),
            duration_s=options.duration_s,
            began=time.monotonic(),
        )
        return await session.run()


def _progress(screen: Screen) -> Callable[[str], None]:
    began = time.monotonic()
    return lambda what: screen.starting(what, time.monotonic() - began)


async def _address(service: InferenceService, replicas: Sequence[RunningReplica], stack: AsyncExitStack) -> str:
    """Where clients find the service: the one engine itself, or a front of several."""
    if len(replicas) == 1:
        return replicas[0].url
    port = service.spec.engine.port
    behind = [front.Replica(replica.name, replica.url) for replica in replicas]
    try:
        await stack.enter_async_context(front.serving(behind, HOST, port))
    except OSError as error:  # it was free when we looked
        raise port_taken(service, error) from error
    return f"http://{HOST}:{port}"


def _announce(screen: Screen, url: str, replicas: Sequence[RunningReplica]) -> None:
    screen.note(f"OpenAI API at {url}/v1")
    for replica in replicas:
        screen.note(f"metrics of {replica.name} at {replica.metrics_url}")


def _load(service: InferenceService, options: UpOptions, client: ChatClient, board: Board) -> DemoLoad | None:
    if not options.demo_load:
        return None
    policy = service.spec.remediation
    plan = replace(options.plan, target_risk=policy.risk_threshold)
    return DemoLoad(client, board, plan, time.monotonic)
