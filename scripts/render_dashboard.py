"""Draw the panels of cluster/monitoring/dashboard.json from a Prometheus server, without Grafana.

    python scripts/render_dashboard.py http://127.0.0.1:9090 panels.html --minutes 30

Every panel's queries are asked as Grafana would; a panel without series says so.
"""

import argparse
import json
import math
import time
import urllib.parse
import urllib.request
from html import escape
from pathlib import Path
from typing import Any

from g2rpo_ray.tracking.report.charts import Series, line_chart
from g2rpo_ray.tracking.report.style import CSS

DASHBOARD = Path(__file__).parents[1] / "cluster" / "monitoring" / "dashboard.json"
COLOURS = ("#2f6fb3", "#d9822b", "#3a9a5b", "#b3372f", "#7a5bb5", "#667080")
POINTS = 120
SCALES = {"percentunit": (100.0, "%"), "bytes": (2.0**-20, "MiB"), "decmbytes": (1.0, "MB")}
"""Factor and name of the units that a reader sees otherwise than Prometheus stores them."""


def query_range(url: str, query: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """The series of a query over a time, as Prometheus answers."""
    parameters = urllib.parse.urlencode(
        {
            "query": query,
            "start": start_s,
            "end": end_s,
            "step": max(1.0, (end_s - start_s) / POINTS),
        }
    )
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{parameters}", timeout=30) as answer:
        return json.load(answer)["data"]["result"]


def page(url: str, dashboard: dict[str, Any], variables: dict[str, str], minutes: float) -> str:
    """All panels in one HTML page."""
    end_s = time.time()
    start_s = end_s - 60 * minutes
    parts = [f"<h1>{escape(dashboard['title'])}</h1>"]
    open_grid = False
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            parts.append(f"{'</div>' if open_grid else ''}<h2>{escape(panel['title'])}</h2>")
            parts.append('<div class="charts three">')
            open_grid = True
            continue
        factor, unit = SCALES.get(panel["fieldConfig"]["defaults"]["unit"], (1.0, ""))
        series: list[Series] = []
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in variables.items():
                query = query.replace(f"${name}", value)
            for one in query_range(url, query, start_s, end_s):
                label = _legend(target["legendFormat"], one["metric"])
                points = [
                    (
                        (at - start_s) / 60,
                        float(text) * factor if math.isfinite(float(text)) else None,
                    )
                    for at, text in one["values"]
                ]
                series.append(
                    Series(label, COLOURS[len(series) % len(COLOURS)], points, dots=False)
                )
        title = f"{panel['title']}, {unit}" if unit else panel["title"]
        parts.append(line_chart(title, series, x_label="minutes"))
    body = "\n".join([*parts, "</div>"])
    style = f"<style>{CSS}</style>"
    return f"<!doctype html><meta charset='utf-8'>{style}<main>{body}</main>"


def _legend(template: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template


def main() -> None:
    """Ask, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="address of Prometheus")
    parser.add_argument("out", type=Path, help="HTML file to write")
    parser.add_argument("--minutes", type=float, default=30.0, help="how far to look back (30)")
    parser.add_argument("--run", default=".*", help="runs to show, a regular expression (all)")
    parser.add_argument("--window", default="1m", help="window of rates (1m)")
    parser.add_argument("--peak-tflops", default="795", help="peak of a GPU in TFLOP/s (795)")
    options = parser.parse_args()
    variables = {"run": options.run, "window": options.window, "peak_tflops": options.peak_tflops}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    try:
        html = page(options.url, dashboard, variables, options.minutes)
    except (OSError, ValueError) as error:
        parser.error(f"{options.url}: no answer of a Prometheus: {error}")
    options.out.write_text(html, encoding="utf-8")


if __name__ == "__main__":
    main()
