"""Strategic merge of pod templates: objects merge by key, lists of named things by their name. Pure.

As `kubectl patch` does it: null removes, `$patch: delete` removes a list's item, `$patch: replace` takes the patch as
it is; lists without a merge key are replaced. Non-goals: other kinds than pod templates, `$retainKeys`, orders.
"""

from __future__ import annotations

from typing import Any

Json = Any

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists whose items have an identity, by field name, as the API's own types declare it."""
DIRECTIVE = "$patch"


def merge(base: Json, patch: Json) -> Json:
    """`patch` over `base`; neither is changed."""
    if not isinstance(base, dict) or not isinstance(patch, dict) or patch.get(DIRECTIVE) == "replace":
        return _plain(patch)
    result = dict(base)
    for key, value in patch.items():
        if key == DIRECTIVE:
            continue
        if value is None:
            result.pop(key, None)
        elif isinstance(value, list) and key in MERGE_KEYS and isinstance(base.get(key), list):
            result[key] = _merge_lists(base[key], value, MERGE_KEYS[key])
        else:
            result[key] = merge(base[key], value) if key in base else _plain(value)
    return result


def _merge_lists(base: list[Json], patch: list[Json], key: str) -> list[Json]:
    result = list(base)
    for item in patch:
        name = item.get(key) if isinstance(item, dict) else None
        index = next((i for i, old in enumerate(result) if name is not None and old.get(key) == name), None)
        if isinstance(item, dict) and item.get(DIRECTIVE) == "delete":
            result = [old for old in result if old.get(key) != name]
        elif index is None:
            result.append(_plain(item))
        else:
            result[index] = merge(result[index], item)
    return result


def _plain(value: Json) -> Json:
    """Without directives and nulls, which mean nothing where there is no base."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k != DIRECTIVE and v is not None}
    if isinstance(value, list):
        return [_plain(v) for v in value if not (isinstance(v, dict) and v.get(DIRECTIVE) == "delete")]
    return value
