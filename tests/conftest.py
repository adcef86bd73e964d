"""Fixtures for all tests: a real Kubernetes control plane for those marked `envtest`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from assets import AssetsMissing, find_or_build
from cluster import Kubectl
from controlplane import ControlPlane

from ullage_operator.crd import crds

CEL_SINCE = (1, 25)
ASSETS = pytest.StashKey[Path | str]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Find or build the binaries before the first test's clock runs."""
    if not any(item.get_closest_marker("envtest") for item in session.items):
        return
    if session.config.option.collectonly:
        return
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    try:
        session.config.stash[ASSETS] = find_or_build(os.environ, reporter.write_line)
    except AssetsMissing as error:
        session.config.stash[ASSETS] = str(error)


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane with our CRDs, shared by the whole run: keep to a namespace of your own."""
    assets = request.config.stash[ASSETS]
    if isinstance(assets, str):
        pytest.skip(assets)
    cache = tmp_path_factory.mktemp("kubectl")

    def install(plane: ControlPlane) -> None:
        kubectl = Kubectl(plane.kubeconfig, cache)
        for text in crds(cel=plane.version() >= CEL_SINCE).values():
            kubectl.apply(text)
        kubectl.run("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")

    with ControlPlane(assets, before_controllers=install) as plane:
        yield plane


@pytest.fixture(scope="session")
def admin(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Kubectl:
    """kubectl as the cluster's administrator."""
    return Kubectl(control_plane.kubeconfig, tmp_path_factory.mktemp("kubectl"))


@pytest.fixture
def kubectl(admin: Kubectl) -> Kubectl:
    """kubectl in a fresh namespace of the test's own."""
    name = f"test-{secrets.token_hex(4)}"
    admin.run("create", "namespace", name)
    return admin.within(name)
