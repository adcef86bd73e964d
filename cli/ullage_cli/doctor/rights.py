"""What the operator's account must be allowed to do; a test holds this to `manifests/rbac/operator_role.yaml`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """Verbs on one resource."""

    group: str
    resource: str
    """With a subresource as `inferenceservices/status`."""
    verbs: tuple[str, ...]
    name: str = ""
    """The only object that it is about."""
    wide: bool = False
    """Whether it is about objects of no namespace."""
    optional: bool = False
    """Whether it matters only where the cluster serves the resource."""


def _right(group: str, resource: str, verbs: str, **more: bool | str) -> Right:
    return Right(group=group, resource=resource, verbs=tuple(verbs.split()), **more)  # type: ignore[arg-type]


RIGHTS: tuple[Right, ...] = (
    _right("ullage.dev", "inferenceservices", "get list watch"),
    _right("ullage.dev", "remediations", "list watch create delete"),
    _right("ullage.dev", "inferenceservices/status", "patch"),
    _right("ullage.dev", "remediations/status", "patch"),
    _right("ullage.dev", "inferenceservices/scale", "patch"),
    _right("ullage.dev", "inferenceservices/finalizers", "update"),
    _right("apps", "deployments", "get list watch create patch"),
    _right("", "services", "get list watch create patch"),
    _right("", "secrets", "get list watch create patch"),
    _right("policy", "poddisruptionbudgets", "get list watch create patch", optional=True),
    _right("networking.k8s.io", "networkpolicies", "get list watch create patch"),
    _right("monitoring.coreos.com", "podmonitors", "get list create patch", optional=True),
    _right("monitoring.coreos.com", "prometheusrules", "get list create patch", optional=True),
    _right("leaderworkerset.x-k8s.io", "leaderworkersets", "get list watch create patch", optional=True),
    _right("", "pods", "list watch patch"),
    _right("", "events", "create"),
    _right("", "namespaces", "list watch", wide=True),
    _right("apiextensions.k8s.io", "customresourcedefinitions", "list watch", wide=True),
    _right(
        "admissionregistration.k8s.io",
        "validatingwebhookconfigurations",
        "get patch",
        name="ullage-operator",
        wide=True,
    ),
)


def review(right: Right, verb: str, account: str, namespace: str | None) -> dict[str, object]:
    """A SubjectAccessReview: may the account do this? Without a namespace it is asked about all of them."""
    resource, _, subresource = right.resource.partition("/")
    attributes = {"group": right.group, "resource": resource, "subresource": subresource, "verb": verb}
    attributes |= {"name": right.name, "namespace": "" if right.wide else (namespace or "")}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": account, "groups": _groups(account), "resourceAttributes": attributes},
    }


def _groups(account: str) -> list[str]:
    namespace = account.split(":")[2]
    return ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
