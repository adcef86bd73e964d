"""Checks of what belongs to the whole installation: server, CRDs, operator, rights, webhook. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import yaml
from cryptography import x509

from ullage_operator.crd import crds

from ..api import Object
from .facts import Facts, Operator, pem
from .findings import Finding, error, info, ok, unknown, warning

CEL_SINCE = 25
LEASE = "ullage-operator"
LEASE_SLACK = 3.0
"""A lease that was not renewed for so many times its duration is held by nobody."""
SOON_S = 14 * 86_400.0
APPLY_CRDS = "kubectl apply -k manifests/crd of this version"


def check_server(facts: Facts) -> Iterator[Finding]:
    """Is the server new enough for the rules in the CRDs?"""
    if facts.minor == 0:
        yield unknown("API server", f"{facts.server} does not tell its version")
    elif facts.minor < CEL_SINCE:
        yield info(
            "API server",
            f"{facts.version} checks no CEL rules (1.{CEL_SINCE} does): only the webhook refuses mistakes in specs",
        )
    else:
        yield ok("API server", f"{facts.version} at {facts.server}")


def check_crds(facts: Facts) -> Iterator[Finding]:
    """Are both kinds there, served, and those of this version?"""
    wanted = {definition["metadata"]["name"]: definition for definition in map(yaml.safe_load, crds().values())}
    for name, found in facts.crds.items():
        subject = f"CRD {name}"
        if subject_unread := facts.unread.get(f"CustomResourceDefinition {name}"):
            yield unknown(subject, subject_unread, "run this as somebody who may read CRDs")
        elif found is None:
            yield error(subject, "is not installed", APPLY_CRDS)
        elif not _condition(found, "Established"):
            yield error(subject, f"is not established: {_why(found)}", "kubectl describe crd " + name)
        elif missing := _missing(schema_of(wanted[name]), schema_of(found)):
            yield warning(subject, f"is of another version: it lacks {missing[0]}{_more(missing)}", APPLY_CRDS)
        else:
            yield ok(subject, "is established and of this version")


def check_operator(facts: Facts) -> Iterator[Finding]:
    """Is there one operator, up and of this version?"""
    if reason := facts.unread.get("operator Deployments"):
        yield unknown("operator", reason, "run this as somebody who may list Deployments in all namespaces")
        return
    if not facts.operators:
        yield warning(
            "operator",
            "no Deployment with app.kubernetes.io/name=ullage-operator: nothing decides, unless it runs elsewhere",
            "kubectl apply -k manifests/default",
        )
        return
    if len({operator.namespace for operator in facts.operators if not operator.namespaces}) > 1:
        yield error(
            "operator",
            "several serve all namespaces and undo each other's work",
            "keep one, or give each its own --namespace",
        )
    for operator in facts.operators:
        yield from _deployed(operator, facts)
        yield from _led(operator, facts.now)


def check_rights(facts: Facts) -> Iterator[Finding]:
    """May the operator do what it has to?"""
    for operator in facts.operators:
        subject = f"rights of {operator.account}"
        if operator.denied is None:
            reason = facts.unread.get("rights of the operator", "could not be asked")
            yield unknown(subject, reason, "run this as somebody who may create subjectaccessreviews")
            continue
        served = {version.rpartition("/")[0] for version in facts.groups}
        denied = [(right, verb) for right, verb in operator.denied if not right.optional or right.group in served]
        if operator.namespaces:  # kept to some namespaces, it watches nothing outside them
            denied = [(right, verb) for right, verb in denied if not right.wide]
        if not denied:
            yield ok(subject, "are complete")
        for resource in dict.fromkeys(f"{right.resource}.{right.group}".rstrip(".") for right, _ in denied):
            verbs = [verb for right, verb in denied if f"{right.resource}.{right.group}".rstrip(".") == resource]
            yield error(subject, f"may not {', '.join(verbs)} {resource}", "kubectl apply -k manifests/rbac")


def check_webhook(facts: Facts) -> Iterator[Finding]:
    """Can the API server reach and trust the webhook?"""
    subject = "webhook"
    if reason := facts.unread.get("webhook"):
        yield unknown(subject, reason, "run this as somebody who may read ValidatingWebhookConfigurations")
        return
    if facts.webhook is None:
        yield info(subject, "is not installed: mistakes in specs are seen in the status only")
        return
    for name, there in facts.webhook_services.items():
        if not there:
            yield error(subject, f"names Service {name}, which does not exist", "kubectl apply -k manifests/operator")
    for hook in facts.webhook.get("webhooks") or []:
        bundle = pem((hook.get("clientConfig") or {}).get("caBundle"))
        if not bundle:
            yield error(
                subject,
                f"{hook.get('name')} has no caBundle: the API server trusts nobody there",
                "see the operator's log; it needs --webhook and the right to patch this object",
            )
            continue
        known = [operator.endpoint_ca for operator in facts.operators if operator.endpoint_ca]
        if known and all(pem(ca).strip() not in bundle for ca in known):
            yield error(
                subject,
                f"{hook.get('name')} trusts another certificate than the operator serves with",
                "restart the operator, which writes its own",
            )
        else:
            yield ok(subject, f"{hook.get('name')} has a certificate to trust")


def check_endpoint(facts: Facts) -> Iterator[Finding]:
    """Is the operator's own certificate good for a while?"""
    for operator in facts.operators:
        if operator.endpoint_certificate:
            yield certificate_finding(
                f"certificate of {operator.namespace}/ullage-operator-endpoint",
                pem(operator.endpoint_certificate),
                facts.now,
                None,
            )


def certificate_finding(subject: str, text: bytes, now: float, name: str | None) -> Finding:
    """Is a certificate readable, for this name, and not near its end?"""
    try:
        certificate = x509.load_pem_x509_certificate(text)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as problem:
        return error(subject, f"cannot be read ({problem})", "delete the Secret: the operator makes a new one")
    left = certificate.not_valid_after_utc.timestamp() - now
    if name is not None and name not in names.get_values_for_type(x509.DNSName):
        return error(subject, f"is not for {name}", "delete the Secret: the operator makes a new one")
    if left <= 0:
        return error(subject, f"expired {-left / 86_400:.0f} days ago", "see why the operator does not renew it")
    if left < SOON_S:
        return warning(subject, f"expires in {left / 86_400:.0f} days", "see why the operator does not renew it")
    return ok(subject, f"is good for {left / 86_400:.0f} days")


def schema_of(crd: Object) -> Object:
    """The schema of the version that we speak; empty where it is not there."""
    for version in crd["spec"].get("versions") or []:
        if version.get("name") == "v1alpha1":
            return dict((version.get("schema") or {}).get("openAPIV3Schema") or {})
    return {}


def _deployed(operator: Operator, facts: Facts) -> Iterator[Finding]:
    subject = f"operator in {operator.namespace}"
    status = operator.deployment.get("status") or {}
    ready, wanted = int(status.get("readyReplicas") or 0), int(operator.deployment["spec"].get("replicas", 1))
    problems = [text for pod in operator.pods if (text := pod_problem(pod))]
    if ready == 0:
        because = f": {problems[0]}" if problems else ""
        yield error(subject, f"is not ready{because}", f"kubectl -n {operator.namespace} describe pods")
    elif ready < wanted:
        yield warning(subject, f"{ready} of {wanted} are ready", f"kubectl -n {operator.namespace} describe pods")
    else:
        yield ok(subject, f"{ready} of {wanted} are ready")
    image = str(operator.container.get("image", ""))
    tag = re.search(r":([^:/@]+)(@|$)", image)
    if tag and tag[1] != facts.own_version:
        yield warning(
            subject,
            f"runs {image}, while this program is {facts.own_version}",
            "use the same version of program, CRDs and operator",
        )


def _led(operator: Operator, now: float) -> Iterator[Finding]:
    subject = f"operator in {operator.namespace}"
    if "--leader-elect" not in operator.arguments:
        return
    lease = next((lease for lease in operator.leases if lease["metadata"]["name"] == LEASE), None)
    spec: dict[str, Any] = (lease or {}).get("spec") or {}
    if not spec.get("holderIdentity"):
        yield error(subject, "nobody holds the lead: nothing is decided", "see the operators' logs")
        return
    renewed = datetime.fromisoformat(spec["renewTime"]).timestamp() if spec.get("renewTime") else 0.0
    silent, duration = now - renewed, float(spec.get("leaseDurationSeconds") or 15)
    if silent > LEASE_SLACK * duration:
        yield error(
            subject,
            f"{spec['holderIdentity']} led last {silent:.0f} s ago: nothing is decided",
            "see the operators' logs; where this machine's clock is off, set it",
        )
    else:
        yield ok(subject, f"{spec['holderIdentity']} leads")


def pod_problem(pod: Object) -> str:
    """Why a pod does not come up, as far as the cluster says."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason', 'not scheduled')}: {condition.get('message', '')}".rstrip(": ")
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in ("ContainerCreating", "PodInitializing"):
            return f"{container['name']}: {waiting['reason']} {waiting.get('message', '')}".strip()
    return ""


def _condition(obj: Object, kind: str) -> bool:
    conditions = (obj.get("status") or {}).get("conditions") or []
    return any(condition["type"] == kind and condition["status"] == "True" for condition in conditions)


def _why(crd: Object) -> str:
    conditions = (crd.get("status") or {}).get("conditions") or []
    bad = [str(c.get("message") or c.get("reason")) for c in conditions if c["status"] == "False"]
    return "; ".join(bad) or "no reason given"


def _missing(wanted: Object, found: Object, path: str = "") -> list[str]:
    """Fields that the wanted schema has and the other has not."""
    missing: list[str] = []
    if not found and wanted:
        return [path or "version v1alpha1"]
    for name, part in (wanted.get("properties") or {}).items():
        here, there = f"{path}.{name}".lstrip("."), (found.get("properties") or {}).get(name)
        missing += [here] if there is None else _missing(part, there, here)
    if wanted.get("items"):
        missing += _missing(wanted["items"], found.get("items") or {}, f"{path}[]")
    return missing


def _more(items: list[str]) -> str:
    return f" and {len(items) - 1} more" if len(items) > 1 else ""
