"""Reading the manifests of cluster/kuberay, and what a CRD's schema says about one.

The schemas are KubeRay's own files, named by ``G2RPO_KUBERAY_CRDS``; nothing of them is kept here.
"""

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[2] / "cluster" / "kuberay"
CRD_FILES = {"RayJob": "ray.io_rayjobs.yaml", "RayCluster": "ray.io_rayclusters.yaml"}
Tree = dict[str, Any]


def crd_folder() -> Path | None:
    """Where KubeRay's CRDs are; by default beside the project's folder."""
    folder = Path(os.environ.get("G2RPO_KUBERAY_CRDS", ROOT.parents[2] / "shared" / "kuberay"))
    return folder if folder.is_dir() else None


def rendered(setting: str) -> list[Tree]:
    """What ``kubectl kustomize cluster/kuberay/<setting>`` prints, for the few features used.

    Any other feature of kustomize is an error: this would render something else than kubectl.
    """
    folder = ROOT / setting
    customization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = customization.keys() - {
        "namespace", "resources", "configMapGenerator", "generatorOptions"
    }  # fmt: skip
    assert not unknown, f"{folder}: {unknown} is not understood here"
    objects = [
        tree
        for file in customization["resources"]
        for tree in yaml.safe_load_all((folder / file).read_text())
    ]
    for generator in customization.get("configMapGenerator", []):
        assert customization["generatorOptions"] == {"disableNameSuffixHash": True}
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": generator["name"]},
                "data": {file: (folder / file).read_text() for file in generator["files"]},
            }
        )
    if namespace := customization.get("namespace"):
        for tree in objects:
            tree["metadata"]["namespace"] = namespace
    return objects


@lru_cache(maxsize=2)
def crd_schema(kind: str) -> Tree:
    """Schema of a kind's served version v1, with every object closed: unknown fields are errors."""
    folder = crd_folder()
    assert folder is not None
    crd = yaml.load((folder / CRD_FILES[kind]).read_text(), yaml.CSafeLoader)
    (version,) = [v for v in crd["spec"]["versions"] if v["name"] == "v1" and v["served"]]
    schema = version["schema"]["openAPIV3Schema"]
    # Kubernetes checks these two itself; the CRD leaves them open.
    schema["properties"]["metadata"] = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"},
            "namespace": {"type": "string"},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    }
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    _close(schema)
    return schema


def schema_part(kind: str, path: str) -> Tree:
    """The part of a schema at a path such as ``spec.entrypoint``; ``[]`` steps into a list."""
    schema = crd_schema(kind)
    for step in path.split("."):
        schema = schema["items"] if step == "[]" else schema["properties"][step]
    return schema


def faults(tree: Any, schema: Tree) -> list[str]:
    """Where ``tree`` does not follow ``schema``, the rules in CEL included."""
    errors = jsonschema.Draft202012Validator(schema).iter_errors(tree)
    found = [f"{'.'.join(map(str, error.path))}: {error.message}" for error in errors]
    return found + list(_broken_rules(tree, schema, ""))


def _close(schema: Any) -> None:
    if isinstance(schema, list):
        for part in schema:
            _close(part)
    elif isinstance(schema, dict):
        if (
            schema.get("type") == "object"
            and "properties" in schema
            and not schema.get("x-kubernetes-preserve-unknown-fields")
        ):
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            _close(part)


MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
CEL: dict[str, Callable[[Any], bool]] = {
    # About a change of an object that is there already.
    "self == oldSelf": lambda _: True,
    "self in ['ray.io/kuberay-operator', 'kueue.x-k8s.io/multikueue']": MANAGERS.__contains__,
    "!((has(self.onSuccess) || has(self.onFailure)) && has(self.deletionRules))": lambda x: (
        not (("onSuccess" in x or "onFailure" in x) and "deletionRules" in x)
    ),
    "((has(self.onSuccess) && has(self.onFailure)) || has(self.deletionRules))": lambda x: (
        ("onSuccess" in x and "onFailure" in x) or "deletionRules" in x
    ),
    "!(has(self.jobStatus) && has(self.jobDeploymentStatus))": lambda x: (
        not ("jobStatus" in x and "jobDeploymentStatus" in x)
    ),
    "has(self.jobStatus) || has(self.jobDeploymentStatus)": lambda x: (
        "jobStatus" in x or "jobDeploymentStatus" in x
    ),
}
"""Rules of the CRDs that JSON schema cannot say, by their text. One that is not here is an error as
soon as a manifest has a field that it is about."""


def _broken_rules(tree: Any, schema: Tree, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        check = CEL.get(rule["rule"])
        if check is None:
            yield f"{path}: nothing here checks the rule {rule['rule']}"
        elif not check(tree):
            yield f"{path}: {rule.get('message', rule['rule'])}"
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key in schema.get("properties", {}):
                yield from _broken_rules(value, schema["properties"][key], f"{path}.{key}")
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _broken_rules(value, schema.get("items", {}), f"{path}[{number}]")
