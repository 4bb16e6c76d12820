"""What `kubectl kustomize` makes of deploy/kubernetes, as far as that uses it: resources, components, patches by file.

A generated ConfigMap keeps its plain name here. Whatever else a kustomization says fails: this reader must learn it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "configMapGenerator"}
# By what the items of a list are told apart when they are merged; other lists are replaced whole.
MERGED_BY = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def build(folder: Path) -> list[Object]:
    """All objects of a kustomization."""
    told = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(told) <= KNOWN, f"{folder}: {set(told) - KNOWN}"
    found: list[Object] = []
    for name in told.get("resources", ()):
        path = folder / name
        found += build(path) if path.is_dir() else _load(path)
    for made in told.get("configMapGenerator", ()):
        data = {name: (folder / name).read_text() for name in made["files"]}
        meta = {"name": made["name"], "namespace": made["namespace"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data})
    for name in told.get("components", ()):
        found = add(found, folder / name)
    return patched(found, folder, told)


def add(objects: list[Object], component: Path) -> list[Object]:
    """Objects with a component added."""
    told = yaml.safe_load((component / "kustomization.yaml").read_text())
    assert told["kind"] == "Component"
    more = [one for name in told.get("resources", ()) for one in _load(component / name)]
    return patched(objects + more, component, told)


def patched(objects: list[Object], folder: Path, told: Mapping[str, Any]) -> list[Object]:
    """Objects with the patches of a kustomization."""
    found = list(objects)
    for patch in told.get("patches", ()):
        (change,) = _load(folder / patch["path"])
        (at,) = [i for i, one in enumerate(found) if identity(one) == identity(change)]
        found[at] = merge(found[at], change)
    assert len({identity(one) for one in found}) == len(found), "two objects of one name"
    return found


def identity(one: Mapping[str, Any]) -> tuple[str, str, str]:
    """What tells an object apart."""
    return one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]


def merge(old: Any, change: Any, key: str = "") -> Any:
    """A strategic merge."""
    if isinstance(old, dict) and isinstance(change, dict):
        whole = {**old, **{k: merge(old[k], v, k) if k in old else v for k, v in change.items()}}
        return {k: v for k, v in whole.items() if v is not None}
    if isinstance(old, list) and isinstance(change, list) and key in MERGED_BY:
        by = MERGED_BY[key]
        named = {one[by]: one for one in change}
        new = [one for one in change if one[by] not in {had[by] for had in old}]
        return [*new, *(merge(one, named[one[by]]) if one[by] in named else one for one in old)]
    return change


def _load(path: Path) -> list[Object]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]
