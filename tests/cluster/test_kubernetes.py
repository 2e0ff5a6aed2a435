"""cluster/kuberay against KubeRay's CRDs, against itself, and against the settings it runs."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from g2rpo_ray.cluster.demand import Node, learner_demand, reward_demands, rollout_demand, shortage
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.models.catalogue import targets_of
from tests.cluster.manifests import (
    CRD_FILES,
    ROOT,
    Tree,
    crd_folder,
    crd_schema,
    faults,
    rendered,
    schema_part,
)

PROJECT = Path(__file__).parents[2]
JOBS = ["one-node", "gpus-16", "elastic"]
SETTINGS = [*JOBS, "interactive"]

needs_crds = pytest.mark.skipif(
    crd_folder() is None, reason="KubeRay's CRDs are not here; name their folder G2RPO_KUBERAY_CRDS"
)


def ray_object(setting: str) -> Tree:
    (tree,) = [tree for tree in rendered(setting) if tree["kind"] in CRD_FILES]
    return tree


def cluster_spec(tree: Tree) -> Tree:
    return tree["spec"] if tree["kind"] == "RayCluster" else tree["spec"]["rayClusterSpec"]


def groups(tree: Tree) -> list[Tree]:
    return cluster_spec(tree)["workerGroupSpecs"]


def pods(tree: Tree) -> Iterator[Tree]:
    """Specs of all pods, the head's first."""
    yield cluster_spec(tree)["headGroupSpec"]["template"]["spec"]
    for group in groups(tree):
        yield group["template"]["spec"]


def containers(tree: Tree) -> Iterator[Tree]:
    for pod in pods(tree):
        yield from pod["containers"]


def settings_of(setting: str) -> Config:
    return load_config(ROOT / setting / "train.yaml")


@needs_crds
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_manifest_follows_the_crd(setting: str) -> None:
    tree = ray_object(setting)
    assert faults(tree, crd_schema(tree["kind"])) == []


@needs_crds
def test_the_network_policy_follows_the_schema_that_the_crd_embeds() -> None:
    (policy,) = [tree for tree in rendered("base") if tree["kind"] == "NetworkPolicy"]
    assert policy["apiVersion"] == "networking.k8s.io/v1"
    assert policy["spec"].keys() == {"podSelector", "policyTypes", "ingress"}
    rules = schema_part("RayCluster", "spec.networkPolicy.head.ingressRules")
    assert faults(policy["spec"]["ingress"], rules) == []
    broken = copy.deepcopy(policy["spec"]["ingress"])
    broken[0]["from"][0]["podselector"] = {}
    assert faults(broken, rules)


@needs_crds
def test_the_volume_claim_follows_the_schema_that_the_crd_embeds() -> None:
    (claim,) = [tree for tree in rendered("base") if tree["kind"] == "PersistentVolumeClaim"]
    volume = "spec.headGroupSpec.template.spec.volumes.[].ephemeral.volumeClaimTemplate.spec"
    assert faults(claim["spec"], schema_part("RayCluster", volume)) == []


def _set(path: str, value: Any) -> Callable[[Tree], None]:
    def change(tree: Any) -> None:
        *parents, last = path.split(".")
        for step in parents:
            tree = tree[int(step)] if step.isdigit() else tree[step]
        tree[last] = value

    return change


def _delete(path: str) -> Callable[[Tree], None]:
    def change(tree: Any) -> None:
        *parents, last = path.split(".")
        for step in parents:
            tree = tree[int(step)] if step.isdigit() else tree[step]
        del tree[last]

    return change


WORKER = "spec.rayClusterSpec.workerGroupSpecs.0"
HEAD_POD = "spec.rayClusterSpec.headGroupSpec.template.spec"


@needs_crds
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("spec.entryPoint", "g2rpo train"), "entryPoint"),
        (_set("spec.backoffLimit", "3"), "backoffLimit"),
        (_set("spec.preRunningDeadlineSeconds", 0), "preRunningDeadlineSeconds"),
        (_set("spec.rayClusterSpec.authOptions.mode", "tokens"), "tokens"),
        (_set("spec.rayClusterSpec.autoscalerOptions.idleTimeout", 9), "idleTimeout"),
        (_set("spec.rayClusterSpec.managedBy", "somebody"), "managedBy"),
        (_set("spec.deletionStrategy", {"onSuccess": {"policy": "DeleteSelf"}}), "BOTH"),
        (_set("spec.deletionStrategy",
              {"deletionRules": [{"policy": "DeleteSelf", "condition": {}}]}), "JobStatus"),
        (_delete(f"{WORKER}.groupName"), "groupName"),
        (_delete(f"{WORKER}.template"), "template"),
        (_set(f"{WORKER}.minReplica", 1), "minReplica"),
        (_set(f"{WORKER}.replicas", 1.5), "replicas"),
        (_set(f"{WORKER}.template.spec.container", []), "container"),
        (_set(f"{WORKER}.template.spec.securityContext.runAsNonroot", True), "runAsNonroot"),
        (_set(f"{HEAD_POD}.containers.0.resource", {}), "resource"),
        (_set(f"{HEAD_POD}.containers.0.resources.limits.memory", "48 Gi"), "48 Gi"),
        (_set(f"{HEAD_POD}.containers.0.ports.0.containerport", 1), "containerport"),
        (_set(f"{HEAD_POD}.containers.0.volumeMounts.0.mountpath", "/x"), "mountpath"),
        (_set(f"{HEAD_POD}.volumes.0.persistentVolumeClaim.name", "x"), "name"),
        (_set("metadata.name", "G2RPO"), "G2RPO"),
    ],
)  # fmt: skip
def test_a_bad_manifest_is_found(change: Callable[[Tree], None], named: str) -> None:
    # Through YAML: parts that share an anchor become parts of their own.
    tree = yaml.safe_load(yaml.safe_dump(copy.deepcopy(ray_object("elastic")), width=1000))
    change(tree)
    found = faults(tree, crd_schema("RayJob"))
    assert found
    assert any(named in fault for fault in found)


@pytest.mark.parametrize("setting", JOBS)
def test_a_job_is_retried_resumed_ended_and_cleaned_up(setting: str) -> None:
    # The schema knows none of these: submissionMode is a plain string in it, the rest is optional.
    spec = ray_object(setting)["spec"]
    assert spec["submissionMode"] == "HTTPMode"
    assert spec["entrypoint"] == "g2rpo train /etc/g2rpo/train.yaml --resume auto"
    assert spec["backoffLimit"] > 0
    assert 0 < spec["preRunningDeadlineSeconds"] < spec["activeDeadlineSeconds"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] > 0
    assert "clusterSelector" not in spec, "a retry needs a cluster of its own"


@pytest.mark.parametrize("setting", SETTINGS)
def test_pods_are_not_root_ask_for_what_they_need_and_share_the_volume(setting: str) -> None:
    tree = ray_object(setting)
    for pod in pods(tree):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.keys() <= volumes
            assert mounts["shared"] == "/shared"
            assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
            assert container["resources"]["requests"] == container["resources"]["limits"]
            tag = container["image"].rpartition(":")[2]
            assert tag not in ("", "latest")
    assert len({container["image"] for container in containers(tree)}) == 1


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_head_has_no_gpu_and_ray_asks_for_a_token(setting: str) -> None:
    spec = cluster_spec(ray_object(setting))
    head = spec["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"
    for container in head["template"]["spec"]["containers"]:
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert spec["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_secret_is_written_down(setting: str) -> None:
    for container in containers(ray_object(setting)):
        for variable in container.get("env", []):
            assert "TOKEN" not in variable["name"] or "valueFrom" in variable
    head, *workers = containers(ray_object(setting))
    assert head["envFrom"] == [{"secretRef": {"name": "g2rpo-tokens", "optional": True}}]
    assert not any("envFrom" in worker for worker in workers)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_name_leads_somewhere(setting: str) -> None:
    objects = rendered("base") + rendered(setting)
    names = {(tree["kind"], tree["metadata"]["name"]) for tree in objects}
    for pod in pods(ray_object(setting)):
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in names
    spaces = {tree["metadata"].get("namespace") for tree in objects if tree["kind"] != "Namespace"}
    assert spaces == {"g2rpo"}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_docs_say_how_many_gpus_it_takes(setting: str) -> None:
    counts = {"minReplicas": 0, "replicas": 0, "maxReplicas": 0}
    for group in groups(ray_object(setting)):
        (container,) = group["template"]["spec"]["containers"]
        for key in counts:
            counts[key] += group[key] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    least, start, most = counts.values()
    text = f"{start} to start, then {least} to {most}" if start < most else str(start)
    lines = (PROJECT / "docs" / "kubernetes.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"| `{setting}` |")]
    assert line.split("|")[-2].strip() == text


def nodes_of(tree: Tree) -> list[Node]:
    """The Ray nodes that the cluster starts with."""
    nodes = [Node("head", "head", {}, {"CPU": 0.0}, {})]
    for group in groups(tree):
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        resources = {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
        nodes += [
            Node(f"{group['groupName']}-{number}", group["groupName"], group.get("labels", {}),
                 resources, dict(resources))
            for number in range(group["replicas"])
        ]  # fmt: skip
    return nodes


@pytest.mark.parametrize("setting", JOBS)
def test_the_settings_fit_the_pods(setting: str) -> None:
    config, nodes = settings_of(setting), nodes_of(ray_object(setting))
    demands = [rollout_demand(config), learner_demand(config), *reward_demands(config)]
    assert shortage(demands, nodes) == []
    assert config.cluster.min_nodes == len(nodes)
    assert shortage(demands, nodes[:-1]), "a pod more than the settings use"


def test_the_elastic_setting_can_use_every_pod_it_may_have() -> None:
    tree, config = ray_object("elastic"), settings_of("elastic")
    by_name = {group["groupName"]: group for group in groups(tree)}
    learner, rollout, reward = by_name["learner"], by_name["rollout"], by_name["reward"]
    assert learner["minReplicas"] == learner["replicas"] == learner["maxReplicas"]
    assert rollout["minReplicas"] == config.rollout.min_workers
    assert rollout["replicas"] == config.rollout.workers
    assert rollout["maxReplicas"] == config.rollout.max_workers
    gpus = sum(r.max_replicas * r.gpus_per_replica for r in config.rewards.values())
    assert reward["maxReplicas"] == gpus
    spec = cluster_spec(tree)
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["idleTimeoutSeconds"] >= config.rollout.timeout_s


PLACES = {
    "workers", "min_workers", "max_workers", "gpus_per_worker", "ranks", "min_replicas",
    "max_replicas", "gpus_per_replica", "label_selector",
}  # fmt: skip
"""Settings that say where and how often, and so change no result."""


def without_places(tree: Any) -> Any:
    """Settings as a recipe has them: paths from its folder, and without ``PLACES``."""
    if isinstance(tree, dict):
        return {key: without_places(value) for key, value in tree.items() if key not in PLACES}
    return tree.replace("/shared/", "") if isinstance(tree, str) else tree


@pytest.mark.parametrize("setting", JOBS)
def test_the_settings_are_a_recipe_run_elsewhere(setting: str) -> None:
    """Only paths, places and the waits for them differ from the recipe that the file names."""
    path = ROOT / setting / "train.yaml"
    recipe = path.read_text().splitlines()[0].split()[1].rstrip(",")
    ours = without_places(settings_of(setting).model_dump(mode="json"))
    published = without_places(load_config(PROJECT / recipe).model_dump(mode="json"))
    for settings in (ours, published):
        del settings["cluster"], settings["checkpoint"]["every"]
    assert ours == published


@pytest.mark.parametrize("setting", JOBS)
def test_every_path_of_the_settings_is_on_the_shared_volume(setting: str) -> None:
    assert relative_paths(settings_of(setting)) == []


def test_the_interactive_command_finds_its_files_and_fits_the_pods() -> None:
    text = (ROOT / "interactive" / "raycluster.yaml").read_text()
    words: list[str] = []
    for line in text[text.index("g2rpo train") :].splitlines():
        words += line.removeprefix("#").removesuffix("\\").split()
        if not line.endswith("\\"):
            break
    config = load_config(PROJECT / words[2], [word for word in words if "=" in word])
    assert relative_paths(config) == []
    demands = [rollout_demand(config), learner_demand(config), *reward_demands(config)]
    assert shortage(demands, nodes_of(ray_object("interactive"))) == []


def relative_paths(config: Config) -> list[str]:
    """Paths of a configuration that are not on the volume that every pod mounts."""
    paths = [config.run_dir, config.prompts.train, config.prompts.heldout]
    paths += [str(target.path) for target in targets_of(config)]
    return [path for path in paths if not path.startswith("/shared/")]
