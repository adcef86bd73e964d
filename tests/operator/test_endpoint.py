"""The TLS endpoint: reviews, alerts, credentials that renew themselves, and hostile callers."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_operator.admission import review
from ullage_operator.authority import Authority, Files
from ullage_operator.book import ServiceKey
from ullage_operator.certificates import LIFETIME, client_context, issue
from ullage_operator.endpoint import Endpoint, serving
from ullage_operator.errors import ClusterError, SetupError
from ullage_operator.logs import JsonFormatter, Named
from ullage_operator.receiver import Told, read_alerts
from ullage_operator.secret import credentials_of, secret_data

NAME = "localhost"


def asked(build: Any, *, old: Any = None, operation: str = "CREATE", **replicas: Any) -> dict[str, Any]:
    obj = build.manifest()
    obj["spec"]["replicas"] = replicas
    request = {"uid": "r", "operation": operation, "object": obj, "oldObject": old}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def test_reviews(build: Any) -> None:
    good, bad = asked(build, min=1, max=2), asked(build, min=3, max=2)
    assert review(good)["response"] == {"uid": "r", "allowed": True}
    answer = review(bad)["response"]
    assert (answer["allowed"], answer["status"]["code"]) == (False, 422)
    assert "spec.replicas.min: 3 is above max 2; lower min or raise max" in answer["status"]["message"]


def test_what_was_accepted_once_can_be_relabelled_and_deleted(build: Any) -> None:
    bad = asked(build, min=3, max=2)["request"]["object"]
    relabelled = asked(build, min=3, max=2, old=copy.deepcopy(bad), operation="UPDATE")
    assert review(relabelled)["response"]["allowed"]
    request = {"uid": "r", "operation": "DELETE", "object": None, "oldObject": bad}
    assert review({"request": request, "kind": "AdmissionReview"})["response"]["allowed"]


def notification(*alerts: dict[str, Any]) -> dict[str, Any]:
    return {"version": "4", "status": "firing", "alerts": list(alerts)}


def alert(status: str = "firing", **labels: str) -> dict[str, Any]:
    base = {"alertname": "UllageRiskHigh", "namespace": "prod", "ullage_service": "web"}
    return {"status": status, "labels": {**base, **labels}, "fingerprint": "f"}


def test_alerts_are_read_by_their_labels() -> None:
    body = notification(alert(pod="web-a"), alert("resolved"), {"status": "firing", "labels": {"alertname": "Other"}})
    first, second, third = list(read_alerts(body, now=5.0))
    assert first is not None
    assert second is not None
    assert (first.service, first.alert.pod, first.firing) == (ServiceKey("prod", "web"), "web-a", True)
    assert (second.firing, second.alert.fingerprint) == (False, "f")
    assert third is None


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["alerts", "labels", "namespace", "request", "kind", "uid"]), inner, max_size=3
        )
    ),
    max_leaves=10,
)


@given(body=JUNK)
def test_any_body_is_read_or_refused(body: Any) -> None:
    with contextlib.suppress(ValueError):
        assert all(told is None or told.service.name for told in read_alerts(body, now=0.0))
    if isinstance(body, dict):
        with contextlib.suppress(ValueError):
            assert "response" in review({**body, "kind": "AdmissionReview"})


class Running:
    """An endpoint that serves; what it was told is in `told`."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.leading = True
        self.url = ""
        self.trusted = ssl.create_default_context()


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    state, credentials = Running(), issue(NAME, now=time.time())
    state.trusted = client_context(credentials)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "pem").write_text(credentials.certificate + credentials.key)
    context.load_cert_chain(tmp_path / "pem")

    def tell(told: Told) -> bool:
        state.told.append(told)
        return told.service.name == "web"

    endpoint = Endpoint(token=lambda: "secret", tell=tell, leading=lambda: state.leading, clock=lambda: 7.0)
    async with serving(endpoint, "127.0.0.1", 0, context) as (_, port):
        state.url = f"https://localhost:{port}"
        yield state


async def post(running: Running, session: aiohttp.ClientSession, path: str, body: Any, token: str = "") -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(running.url + path, data=data, headers=headers, ssl=running.trusted) as response:
        return response.status, await response.json()


async def test_alerts_need_the_token_and_a_leader(running: Running, session: aiohttp.ClientSession) -> None:
    body = notification(alert(), alert(ullage_service="gone"))
    for token in ("", "wrong", "sécret"):
        assert (await post(running, session, "/v1/alerts", body, token))[0] == 401
    running.leading = False
    assert (await post(running, session, "/v1/alerts", body, "secret"))[0] == 503
    assert running.told == []
    running.leading = True
    assert await post(running, session, "/v1/alerts", body, "secret") == (200, {"accepted": 1, "ignored": 1})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, {}, {"alerts": [1]}])
async def test_nonsense_is_refused(running: Running, session: aiohttp.ClientSession, body: Any) -> None:
    assert (await post(running, session, "/v1/alerts", body, "secret"))[0] == 400
    assert (await post(running, session, "/validate", body))[0] == 400


async def test_reviews_over_the_wire(running: Running, session: aiohttp.ClientSession, build: Any) -> None:
    status, answer = await post(running, session, "/validate", asked(build, min=3, max=2))
    assert (status, answer["response"]["allowed"]) == (200, False)


class Store:
    """Secret and webhook configuration as the API keeps them."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.race: Callable[[], None] | None = None

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.objects.get(kind))

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        if self.race:
            self.race()
        if obj["kind"] in self.objects:
            raise ClusterError("exists", status=409)
        self.objects[obj["kind"]] = {**obj, "metadata": {**obj["metadata"], "resourceVersion": "1"}}
        return obj

    async def patch(self, kind: str, namespace: str | None, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self.objects[kind] |= {k: v for k, v in body.items() if k != "metadata"}
        return self.objects[kind]


def authority(store: Store, now: list[float], files: Files | None = None) -> Authority:
    return Authority(
        cluster=store,  # type: ignore[arg-type]
        namespace="n",
        secret="s",
        dns_name=NAME,
        webhook="w",
        files=files,
        clock=lambda: now[0],
    )


def bundle(store: Store) -> str:
    (hook,) = store.objects["ValidatingWebhookConfiguration"]["webhooks"]
    return base64.b64decode(hook["clientConfig"]["caBundle"]).decode()


@pytest.fixture
def store() -> Store:
    made = Store()
    made.objects["ValidatingWebhookConfiguration"] = {
        "metadata": {"resourceVersion": "1"},
        "webhooks": [{"name": "x", "clientConfig": {"service": {}}}],
    }
    return made


async def test_credentials_are_made_once_shared_and_renewed(store: Store) -> None:
    now = [1_800_000_000.0]
    first, second = authority(store, now), authority(store, now)
    await first.refresh()
    await second.refresh()
    assert first.token == second.token != ""
    old = credentials_of(store.objects["Secret"])
    assert bundle(store) == old.trusted
    now[0] += LIFETIME.total_seconds() - 86_400
    await second.refresh()
    renewed = credentials_of(store.objects["Secret"])
    assert renewed.certificate != old.certificate
    assert renewed.token == old.token, "Alertmanager keeps its token"
    assert old.certificate in bundle(store), "replicas that serve with the old one stay reachable"
    await first.refresh()
    assert first._loaded == renewed.certificate


async def test_of_two_replicas_that_start_at_once_one_writes(store: Store) -> None:
    winner = issue(NAME, now=1_800_000_000.0)

    def race() -> None:
        store.objects["Secret"] = {"metadata": {"resourceVersion": "1"}, "data": secret_data(winner)}

    store.race = race
    loser = authority(store, [1_800_000_000.0])
    await loser.refresh()
    assert loser.token == winner.token
    assert bundle(store) == winner.trusted


async def test_files_of_somebody_else_are_reread(store: Store, tmp_path: Path) -> None:
    files = Files(certificate=tmp_path / "c", key=tmp_path / "k")
    made = authority(store, [1_800_000_000.0], files)
    with pytest.raises(SetupError, match="--endpoint-cert"):
        await made.refresh()
    for _ in range(2):
        credentials = issue(NAME, now=1_800_000_000.0)
        files.certificate.write_text(credentials.certificate)
        files.key.write_text(credentials.key)
        await made.refresh()
        assert credentials.key in made._loaded
    assert "caBundle" not in store.objects["ValidatingWebhookConfiguration"]["webhooks"][0]["clientConfig"]


def test_log_lines_name_the_object(caplog: pytest.LogCaptureFixture) -> None:
    log = Named(logging.getLogger("t"), "prod/web")
    with caplog.at_level(logging.INFO):
        log.info("risk %d", 90)
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("failed")
    plain, failed = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert (plain["object"], plain["level"]) == ("InferenceService/prod/web", "info")
    assert plain["message"] == "prod/web: risk 90"
    assert "ValueError: broken" in failed["exception"]
    foreign = logging.LogRecord("kopf", logging.INFO, "", 0, "x", (), None)
    foreign.object = {"not": "a name"}
    assert "object" not in json.loads(JsonFormatter().format(foreign))
