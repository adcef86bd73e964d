"""Answers of the validating webhook: what the schema's own rules cannot say. Pure.

Only a changed spec is judged: an object whose spec was accepted once, by whichever version, can always have its
metadata changed and be deleted.
"""

from __future__ import annotations

from typing import Any

from ullage_operator.errors import ManifestError
from ullage_operator.manifest import read_service

Object = dict[str, Any]


def review(body: Object) -> Object:
    """The AdmissionReview to answer with.

    Raises:
        ValueError: this is no AdmissionReview that can be answered.
    """
    request = body.get("request")
    if body.get("kind") != "AdmissionReview" or not isinstance(request, dict) or not request.get("uid"):
        raise ValueError("not an AdmissionReview with a request")
    problem = _problem(request)
    response: Object = {"uid": request["uid"], "allowed": problem is None}
    if problem is not None:
        response["status"] = {"code": 422, "reason": "Invalid", "message": problem}
    return {
        "apiVersion": body.get("apiVersion", "admission.k8s.io/v1"),
        "kind": "AdmissionReview",
        "response": response,
    }


def _problem(request: Object) -> str | None:
    obj, old = request.get("object"), request.get("oldObject")
    if request.get("operation") not in ("CREATE", "UPDATE") or not isinstance(obj, dict):
        return None
    if isinstance(old, dict) and old.get("spec") == obj.get("spec"):
        return None
    try:
        read_service({key: value for key, value in obj.items() if key != "status"}, stored=True)
    except ManifestError as error:
        return str(error)
    return None
