"""Connection to the API server."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from ullage_operator.errors import ClusterError, SetupError
from ullage_operator.kube import Cluster
from ullage_operator.model import API_VERSION


async def api_client(kubeconfig: Path | None) -> ApiClient:
    """A client by kubeconfig, or in-cluster where there is none.

    Raises:
        SetupError: neither can be used.
    """
    configuration = Configuration()
    try:
        if kubeconfig is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            file = str(kubeconfig) if kubeconfig else None
            load = load_kube_config(config_file=file, client_configuration=configuration)  # type: ignore[no-untyped-call]
            await load
    except (ConfigException, OSError) as error:
        where = kubeconfig or "in-cluster or $KUBECONFIG"
        why = " ".join(str(error).split())
        raise SetupError(f"--kubeconfig: {where} cannot be used ({why}); give another") from error
    host = urlsplit(configuration.host)
    if configuration.proxy is None and not proxy_bypass(host.hostname or ""):
        configuration.proxy = getproxies().get(host.scheme)
    # Else aiohttp looks all that up anew, in a thread, at every single call.
    configuration.client_session_kwargs = {"trust_env": False}
    return ApiClient(configuration)


async def require_crds(cluster: Cluster) -> None:
    """Make sure that our kinds are known.

    Raises:
        SetupError: they are not, or nobody answers.
    """
    try:
        known = "inferenceservices" in await cluster.resources(API_VERSION)
    except ClusterError as error:
        raise SetupError(f"the API server does not answer: {error}; check --kubeconfig") from error
    if not known:
        raise SetupError(f"the API server has no {API_VERSION}; apply manifests/crd first")
