"""Ray's dashboard and the metrics that every node offers to Prometheus."""

import urllib.error
import urllib.request

import ray

from g2rpo_ray.doctor.findings import Finding, ok, warn

TIMEOUT_S = 10.0


def check_services(dashboard_url: str | None, wanted: bool) -> list[Finding]:
    """``dashboard_url`` is host:port, empty or None where there is none, though it was wanted."""
    return [_dashboard(dashboard_url, wanted), *_metrics()]


def _dashboard(url: str | None, wanted: bool) -> Finding:
    if not url:
        if not wanted:
            return ok("dashboard", "off (cluster.dashboard)")
        remedy = "pip install 'ray[default]' on the head, and see dashboard.log there"
        return warn("dashboard", "Ray has started none", remedy)
    problem = _get(f"http://{url}/")
    if problem:
        remedy = "see dashboard.log on the head; a firewall or --dashboard-host may be in the way"
        return warn("dashboard", f"http://{url}: {problem}", remedy)
    return ok("dashboard", f"http://{url} answers")


def _metrics() -> list[Finding]:
    urls = [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]
    problems = {url: _get(url) for url in urls}
    findings = [
        warn("metrics", f"{url}: {problem}", "open that port to Prometheus; see agent logs there")
        for url, problem in problems.items()
        if problem
    ]
    return findings or [ok("metrics", f"{len(urls)} nodes answer, such as {urls[0]}")]


def _get(url: str) -> str | None:
    """What is wrong with an address, if anything."""
    try:
        # No proxy: these are the cluster's own addresses.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except (urllib.error.URLError, OSError) as error:
        return str(error)
