"""The few calls to the Kubernetes API that the operator makes, as plain JSON objects.

Children are written by server-side apply under `SPEC_MANAGER`; status under `STATUS_MANAGER`, because API servers
before 1.22 keep one list of owned fields for both. Non-goals: watching (kopf does), caching, deciding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from ullage_operator.errors import ClusterError

Object = dict[str, Any]

SPEC_MANAGER = "ullage-operator"
STATUS_MANAGER = "ullage-operator-status"
CALL_TIMEOUT_S = 15.0
PAGE = 500
"""Objects that one list call asks for."""

_PATHS: Mapping[str, tuple[str, str]] = {
    "Deployment": ("/apis/apps/v1", "deployments"),
    "Service": ("/api/v1", "services"),
    "Secret": ("/api/v1", "secrets"),
    "Pod": ("/api/v1", "pods"),
    "Event": ("/api/v1", "events"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "ValidatingWebhookConfiguration": ("/apis/admissionregistration.k8s.io/v1", "validatingwebhookconfigurations"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("", "poddisruptionbudgets"),
    "PodMonitor": ("/apis/monitoring.coreos.com/v1", "podmonitors"),
    "PrometheusRule": ("/apis/monitoring.coreos.com/v1", "prometheusrules"),
    "LeaderWorkerSet": ("/apis/leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
    "InferenceService": ("/apis/ullage.dev/v1alpha1", "inferenceservices"),
    "Remediation": ("/apis/ullage.dev/v1alpha1", "remediations"),
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Calls through one API client, which the caller owns. Every method may raise ClusterError."""

    api: ApiClient
    counted: Callable[[str, int | None], None] = lambda method, status: None
    """Told of every call: its method and the answer's status, None without an answer."""

    async def get(self, kind: str, namespace: str | None, name: str, *, version: str = "") -> Object | None:
        """The object, or None when there is none; `version` for a kind that is served in several."""
        try:
            return await self._call("GET", _path(kind, namespace, name, version=version))
        except ClusterError as error:
            if error.status == 404 and error.about == name:
                return None
            raise

    async def list(self, kind: str, namespace: str | None, selector: str = "", *, version: str = "") -> list[Object]:
        """All objects that match a label selector, page by page; of all namespaces where none is named.

        Without their managed fields, which are half of an object and tell us nothing.
        """
        query = {"limit": str(PAGE), **({"labelSelector": selector} if selector else {})}
        items: list[Object] = []
        while True:
            page = await self._call("GET", _path(kind, namespace, version=version), query)
            found = page.get("items") or []
            for item in found:
                item["metadata"].pop("managedFields", None)
            items += found
            following = page.get("metadata", {}).get("continue")
            if not following:
                return items
            query["continue"] = following

    async def apply(self, obj: Object) -> Object:
        """Create or update by server-side apply; fields that we own are set back, others are left alone."""
        metadata = obj["metadata"]
        query = {"fieldManager": SPEC_MANAGER, "force": "true"}
        path = _path(obj["kind"], metadata["namespace"], metadata["name"], version=obj["apiVersion"])
        return await self._call("PATCH", path, query, obj, "application/apply-patch+yaml")

    async def create(self, obj: Object) -> Object:
        """Create; an object of that name is a ClusterError with status 409."""
        query = {"fieldManager": SPEC_MANAGER}
        return await self._call("POST", _path(obj["kind"], obj["metadata"]["namespace"]), query, obj)

    async def write_status(self, kind: str, namespace: str, name: str, status: Object) -> Object:
        """Merge into the status; None removes a field, lists are replaced."""
        query = {"fieldManager": STATUS_MANAGER}
        path = f"{_path(kind, namespace, name)}/status"
        return await self._call("PATCH", path, query, {"status": status}, "application/merge-patch+json")

    async def patch(
        self, kind: str, namespace: str | None, name: str, body: Object, *, subresource: str = ""
    ) -> Object:
        """Merge into an object or its subresource; with a resourceVersion in it only if that is still the present."""
        path = _path(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        return await self._call("PATCH", path, {"fieldManager": SPEC_MANAGER}, body, "application/merge-patch+json")

    async def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete; one that is gone is no error."""
        try:
            await self._call("DELETE", _path(kind, namespace, name))
        except ClusterError as error:
            if error.status != 404 or error.about != name:
                raise

    async def resources(self, group_version: str) -> frozenset[str]:
        """Plural names that the API server serves in a group and version; none where it does not know it."""
        try:
            found = await self._call("GET", f"/apis/{group_version}")
        except ClusterError as error:
            if error.status == 404:
                return frozenset()
            raise
        return frozenset(resource["name"] for resource in found.get("resources") or [])

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        url = f"{self.api.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json", "Content-Type": content_type}
        try:
            await self.api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
            response = await self.api.call_api(method, url, headers, body, _request_timeout=CALL_TIMEOUT_S)
            data = await response.read()  # type: ignore[no-untyped-call]
        except (TimeoutError, ApiException, aiohttp.ClientError, OSError) as error:
            self.counted(method, None)
            raise ClusterError(f"{method} {path}: {type(error).__name__}: {error}") from error
        self.counted(method, response.status)
        return _answer(f"{method} {path}", response.status, data)


def _path(kind: str, namespace: str | None, name: str | None = None, *, version: str = "") -> str:
    base, plural = _PATHS[kind]
    base = base or f"/apis/{version}"
    scope = "" if namespace is None else f"/namespaces/{quote(namespace, safe='')}"
    path = f"{base}{scope}/{plural}"
    return path if name is None else f"{path}/{quote(name, safe='')}"


def _answer(call: str, status: int, data: bytes) -> Object:
    try:
        answer = json.loads(data)
    except ValueError as error:
        raise ClusterError(f"{call}: HTTP {status} without JSON", status=status) from error
    if status >= 400:
        known = answer if isinstance(answer, dict) else {}
        about = (known.get("details") or {}).get("name")
        raise ClusterError(f"{call}: HTTP {status}: {known.get('message') or 'no message'}", status=status, about=about)
    if not isinstance(answer, dict):
        raise ClusterError(f"{call}: the answer is not an object", status=status)
    return answer
