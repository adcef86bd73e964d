"""Certificate and token of the operator's own endpoint: kept in a Secret, renewed in time, told to the API server.

Every replica serves with what the Secret holds. Whoever finds it missing or near its end writes a new one; the old
certificate stays trusted, so replicas that have not looked yet remain reachable. With files given (cert-manager), the
files are reread and nothing is written.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ullage_operator.certificates import Credentials, issue, valid
from ullage_operator.errors import ClusterError, SetupError
from ullage_operator.kube import Cluster, Object
from ullage_operator.secret import credentials_of, secret_data

LOOK_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Certificate and key made by somebody else."""

    certificate: Path
    key: Path


@dataclass(kw_only=True)
class Authority:
    """Keeps one endpoint's credentials. `refresh` before anything else."""

    cluster: Cluster
    namespace: str
    secret: str
    dns_name: str
    webhook: str | None
    """Name of the ValidatingWebhookConfiguration whose caBundle is kept; None: none."""
    files: Files | None
    clock: Callable[[], float]
    context: ssl.SSLContext = field(default_factory=lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    token: str = ""
    _loaded: str = ""

    async def refresh(self) -> None:
        """Look at the Secret, renew it where needed, serve with it.

        Raises:
            ClusterError: the API refused or did not answer; what was served before goes on.
            SetupError: the files given cannot be used.
        """
        credentials = await self._stored_or_new()
        self.token = credentials.token
        if self.files is not None:
            self._load_files(self.files)
            return
        if credentials.certificate != self._loaded:
            _load(self.context, credentials)
            self._loaded = credentials.certificate
        if self.webhook is not None:
            await self._tell(self.webhook, credentials.trusted)

    async def keep(self, *, every_s: float = LOOK_S) -> None:
        """Refresh for ever."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.refresh()
            except (ClusterError, SetupError) as error:
                log.warning("endpoint's credentials: %s", error)

    async def _stored_or_new(self) -> Credentials:
        obj = await self.cluster.get("Secret", self.namespace, self.secret)
        stored = credentials_of(obj) if obj else None
        if stored is not None and valid(stored, self.dns_name, now=self.clock()):
            return stored
        fresh = issue(self.dns_name, now=self.clock(), previous=stored if stored and stored.token else None)
        return await self._write(obj, fresh)

    async def _write(self, obj: Object | None, fresh: Credentials) -> Credentials:
        """Of two replicas that write at once one wins; the other takes what was written."""
        data = secret_data(fresh)
        try:
            if obj is None:
                metadata = {"name": self.secret, "namespace": self.namespace}
                secret = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}
                await self.cluster.create(secret)
            else:
                version = obj["metadata"]["resourceVersion"]
                body = {"metadata": {"resourceVersion": version}, "data": data}
                await self.cluster.patch("Secret", self.namespace, self.secret, body)
        except ClusterError as error:
            if error.status != 409:
                raise
            winner = await self.cluster.get("Secret", self.namespace, self.secret)
            return credentials_of(winner) if winner else fresh
        return fresh

    async def _tell(self, webhook: str, trusted: str) -> None:
        """Put what callers should trust into the webhook's configuration."""
        bundle = base64.b64encode(trusted.encode()).decode()
        found = await self.cluster.get("ValidatingWebhookConfiguration", None, webhook)
        if found is None:
            return
        hooks = found.get("webhooks") or []
        if all(hook["clientConfig"].get("caBundle") == bundle for hook in hooks):
            return
        for hook in hooks:
            hook["clientConfig"]["caBundle"] = bundle
        body = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "webhooks": hooks}
        await self.cluster.patch("ValidatingWebhookConfiguration", None, webhook, body)

    def _load_files(self, files: Files) -> None:
        try:
            text = files.certificate.read_text() + files.key.read_text()
            if text != self._loaded:
                self.context.load_cert_chain(files.certificate, files.key)
                self._loaded = text
        except (OSError, ValueError) as error:
            raise SetupError(
                f"--endpoint-cert {files.certificate}: cannot be used ({error}); give a PEM pair"
            ) from error


def _load(context: ssl.SSLContext, credentials: Credentials) -> None:
    # The ssl module reads keys from files only; this one is private and gone at once.
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(credentials.certificate + credentials.key)
        file.flush()
        context.load_cert_chain(file.name)
