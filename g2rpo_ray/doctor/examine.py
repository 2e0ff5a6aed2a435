"""Every check in order, each on its own: what one finds wrong does not hide the others."""

from collections.abc import Callable

import ray

from g2rpo_ray.cluster.connect import ray_cluster
from g2rpo_ray.cluster.demand import ClusterError, has_autoscaler, living_nodes
from g2rpo_ray.cluster.private import PrivateRayError, ray_folder
from g2rpo_ray.config import Config
from g2rpo_ray.config.operation import ClusterSection
from g2rpo_ray.doctor.checks.attention import check_flash3
from g2rpo_ray.doctor.checks.clock import check_clock
from g2rpo_ray.doctor.checks.hardware import check_hardware
from g2rpo_ray.doctor.checks.limits import check_limits
from g2rpo_ray.doctor.checks.models import check_models
from g2rpo_ray.doctor.checks.network import check_network
from g2rpo_ray.doctor.checks.prompts import check_prompts
from g2rpo_ray.doctor.checks.room import check_room
from g2rpo_ray.doctor.checks.secrets import check_authentication, check_secrets
from g2rpo_ray.doctor.checks.services import check_services
from g2rpo_ray.doctor.checks.storage import check_storage
from g2rpo_ray.doctor.checks.versions import check_versions
from g2rpo_ray.doctor.findings import Finding, fail, ok, warn_if
from g2rpo_ray.doctor.probe import ask, name_of, node_facts, start_probe


def examine(config: Config | None) -> list[Finding]:
    """Look at the cluster, and at what ``config``, if there is one, needs of it."""
    cluster = config.cluster if config else ClusterSection()
    findings = check_secrets(config)
    findings += check_prompts(config) if config else []
    try:
        with ray_cluster(cluster) as private:
            findings += _examine_cluster(config, cluster, private)
    except PrivateRayError as error:
        findings.append(fail("cluster", error.what, error.remedy))
    except ClusterError as error:
        remedy = "start the head ('ray start --head'), correct RAY_ADDRESS, or show it the token"
        findings.append(fail("cluster", str(error), remedy))
    return findings


def _examine_cluster(
    config: Config | None, cluster: ClusterSection, private: bool
) -> list[Finding]:
    nodes = {name_of(node): node for node in living_nodes()}
    findings = [
        ok("cluster", f"{'a private Ray' if private else 'Ray'} with {len(nodes)} nodes"),
        check_authentication(private),
    ]
    if private:
        folder, reason = ray_folder()
        what, remedy = f"{folder}. {reason}", "set RAY_TMPDIR if its sessions shall lie elsewhere"
        findings.append(warn_if(bool(reason), "ray folder", what.rstrip(". "), remedy))
    if config:
        findings += check_room(config, list(nodes.values()), not private and has_autoscaler())
    probes = {name: start_probe(node) for name, node in nodes.items()}
    remedy = (
        "that node's Python must import g2rpo_ray and what it needs: install the same image or "
        "environment there, or send the code with the job (ray job submit --working-dir)"
    )
    facts, silent = ask(probes, "nodes", remedy, node_facts)
    findings += silent
    probes = {name: probes[name] for name in facts}
    if not probes:
        return findings
    findings += [*check_versions(facts), *check_hardware(nodes, facts), *check_limits(facts)]
    dashboard_url = ray._private.worker.global_worker.node.webui_url
    checks: list[Callable[[], list[Finding]]] = [
        lambda: check_clock(probes),
        lambda: check_network([nodes[name] for name in probes]),
        lambda: check_services(dashboard_url, cluster.dashboard or not private),
    ]
    if config:
        checks += [
            lambda: check_storage(config, probes),
            lambda: check_models(config, probes),
            lambda: check_flash3(config, nodes, facts, probes),
        ]
    for check in checks:
        try:
            findings += check()
        except ray.exceptions.RayError as error:
            cause = str(error).strip().splitlines()[-1]
            findings.append(fail("nodes", f"a node left meanwhile: {cause}", "see its raylet.out"))
    return findings
