"""The Kubernetes API as `top`, `doctor` and `explain` read it: plain JSON by path, with kubectl's own configuration.

Reading only, but for reviews of access, which change nothing, and the approval of a remediation.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import yaml
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from .errors import CliError, InputError

Object = dict[str, Any]
GROUP = "/apis/ullage.dev/v1alpha1"
TIMEOUT_S = 10.0
PAGE = 500


class ApiFailed(CliError):
    """The API server refused a call (`status`), or did not answer (`status` is None)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which cluster, and which part of it."""

    kubeconfig: Path | None = None
    """None: $KUBECONFIG, ~/.kube/config, or the pod's own account."""
    context: str | None = None
    namespace: str | None = None
    """None: that of the context."""
    all_namespaces: bool = False


class Api:
    """Calls through one client. Every method may raise ApiFailed."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        self.server: str = client.configuration.host

    async def get(self, path: str) -> Object | None:
        """An object, or None where there is none (or no such kind)."""
        try:
            return await self._json("GET", path)
        except ApiFailed as error:
            if error.status == 404:
                return None
            raise

    async def list(self, path: str, selector: str = "") -> list[Object]:
        """All objects of a collection, page by page; none where the kind is not known."""
        query = {"limit": str(PAGE), **({"labelSelector": selector} if selector else {})}
        items: list[Object] = []
        while True:
            page = await self.get(f"{path}?{urlencode(query)}")
            if page is None:
                return items
            items += page.get("items") or []
            following = (page.get("metadata") or {}).get("continue")
            if not following:
                return items
            query["continue"] = following

    async def post(self, path: str, body: Object) -> Object:
        """Send an object, such as a review, and take the answer."""
        return await self._json("POST", path, body)

    async def merge(self, path: str, body: Object) -> Object:
        """Merge into an object; with a resourceVersion in `body` only if that is still the present one (else 409)."""
        return await self._json("PATCH", path, body, "application/merge-patch+json")

    async def text(self, path: str) -> str:
        """An answer that is not JSON, such as metrics read through the API server."""
        return (await self._call("GET", path, None)).decode(errors="replace")

    async def _json(
        self, method: str, path: str, body: Object | None = None, content: str = "application/json"
    ) -> Object:
        data = await self._call(method, path, body, content)
        try:
            answer = json.loads(data)
        except ValueError as error:
            raise ApiFailed(f"{method} {path}: the answer is not JSON") from error
        if not isinstance(answer, dict):
            raise ApiFailed(f"{method} {path}: the answer is not an object")
        return answer

    async def _call(self, method: str, path: str, body: Object | None, content: str = "application/json") -> bytes:
        headers = {"Accept": "application/json, text/plain, */*", "Content-Type": content}
        url = f"{self.server}{path}"
        try:
            await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
            response = await self._client.call_api(method, url, headers, body, _request_timeout=TIMEOUT_S)
            data: bytes = await response.read()  # type: ignore[no-untyped-call]
        except (TimeoutError, ApiException, aiohttp.ClientError, OSError) as error:
            raise ApiFailed(f"{self.server} does not answer: {type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status >= 400:
            raise ApiFailed(f"{method} {path}: HTTP {response.status}: {_message(data)}", response.status)
        return data


@asynccontextmanager
async def connected(where: Where) -> AsyncIterator[Api]:
    """A client as kubectl would have it.

    Raises:
        InputError: no configuration can be used.
    """
    configuration = Configuration()
    namespace = where.namespace
    try:
        if where.kubeconfig is None and where.context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            namespace = namespace or _pod_namespace()
        else:
            files = [where.kubeconfig] if where.kubeconfig else _files()
            if not any(file.exists() for file in files):
                raise ConfigException("there is no such file")
            file = str(where.kubeconfig) if where.kubeconfig else None
            await load_kube_config(  # type: ignore[no-untyped-call]
                config_file=file, context=where.context, client_configuration=configuration
            )
            namespace = namespace or _context_namespace(where)
    except (ConfigException, OSError) as error:
        why = " ".join(str(error).split())
        what = where.kubeconfig or "$KUBECONFIG or ~/.kube/config"
        raise InputError(f"--kubeconfig: {what} cannot be used ({why}); give another, or --context") from error
    client = ApiClient(configuration)
    try:
        yield Api(client, namespace or "default")
    finally:
        await client.close()  # type: ignore[no-untyped-call]


def path_of(where: Where, api: Api, plural: str, base: str = GROUP) -> str:
    """Path of a collection in the namespace that was asked for, or in all."""
    if where.all_namespaces:
        return f"{base}/{plural}"
    return f"{base}/namespaces/{quote(api.namespace, safe='')}/{plural}"


def _context_namespace(where: Where) -> str | None:
    """The namespace that the context names, as kubectl takes it."""
    files = [where.kubeconfig] if where.kubeconfig else _files()
    contexts: dict[str, Object] = {}
    current = where.context
    for file in files:
        try:
            config = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError):
            continue
        current = current or config.get("current-context")
        for entry in config.get("contexts") or []:
            contexts.setdefault(entry.get("name"), entry.get("context") or {})
    return contexts.get(current or "", {}).get("namespace")


def _files() -> list[Path]:
    named = os.environ.get("KUBECONFIG")
    if named:
        return [Path(part).expanduser() for part in named.split(os.pathsep) if part]
    return [Path("~/.kube/config").expanduser()]


def _pod_namespace() -> str | None:
    try:
        file = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        return file.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _message(data: bytes) -> str:
    try:
        answer = json.loads(data)
    except ValueError:
        return data[:200].decode(errors="replace")
    return str(answer.get("message", "no message")) if isinstance(answer, dict) else "no message"
