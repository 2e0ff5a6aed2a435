"""Measures the start of a run: time, CPU and large libraries of every role.

    python scripts/bench_start.py configs/quickstart.yaml run_dir=runs/start

starts all roles as ``g2rpo train`` does, asks each what it has imported, and ends. Time is from the
command on; CPU seconds (user and system, of all processes of the run) say more on a busy machine.
``--json FILE`` writes the numbers, too.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

import program

LARGE = ("torch", "torch._dynamo", "diffusers", "transformers", "peft", "deepspeed", "open_clip",
         "torchvision", "ray.serve", "ray.data", "pandas", "gradio")  # fmt: skip


def imported(_role: object = None) -> dict[str, Any]:
    """What this process has imported and used so far; runs in any role."""
    import os
    import sys

    used = os.times()
    return {
        "large": [name for name in LARGE if name in sys.modules],
        "modules": len(sys.modules),
        "cpu_s": round(used.user + used.system, 1),
        "pid": os.getpid(),
    }


def measure(config_file: Path, overrides: list[str]) -> dict[str, Any]:
    """Start all roles and end them; time, CPU and what each role has imported."""
    from g2rpo_ray.config import load_config

    config = load_config(config_file, overrides)
    import ray

    from g2rpo_ray.training.roles import launch
    from g2rpo_ray.training.session import open_session

    with open_session(config, "none") as session, launch(config, None, session.note) as roles:
        seconds = time.time() - psutil.Process().create_time()
        actors = dict(zip(["encoder"], roles.encoder.started, strict=False))
        actors |= {f"rank {n}": rank for n, rank in enumerate(roles.learner.ranks)}
        actors |= {f"worker {n}": worker for n, worker in enumerate(roles.pool.workers)}
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["name"].startswith("SERVE_REPLICA"):
                name = entry["name"].split("#")[-2]
                actors[f"reward {name}"] = ray.get_actor(entry["name"], entry["namespace"])
        asked = {name: actor.__ray_call__.remote(imported) for name, actor in actors.items()}
        answers = {"driver": imported()} | {name: ray.get(ref) for name, ref in asked.items()}
        every = [psutil.Process(), *psutil.Process().children(recursive=True)]
        used = {process.pid: sum(process.cpu_times()[:2]) for process in every}
        ours = {role["pid"] for role in answers.values()}
        return {
            "seconds": round(seconds, 1),
            "cpu_s": round(sum(used.values()), 1),
            "processes": len(every),
            "load": round(os.getloadavg()[0], 1),
            "roles": answers,
            "rays": [(name_of(p), round(used[p.pid], 1)) for p in every if p.pid not in ours],
        }


def name_of(process: psutil.Process) -> str:
    """Of one of Ray's own processes: its program, Python's by the script's name."""
    words = [Path(word).name for word in process.cmdline() if not word.startswith("-")]
    return next((word for word in words if not word.startswith("python")), process.name())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--json", type=program.output)
    options = parser.parse_args()
    found = measure(options.config, options.overrides)
    print(f"all roles after {found['seconds']} s, {found['cpu_s']} s of CPU in "
          f"{found['processes']} processes, load {found['load']}")  # fmt: skip
    for name, role in found["roles"].items():
        print(f"{name:<14} CPU {role['cpu_s']:5.1f} s  modules {role['modules']:5}  "
              f"{' '.join(role['large'])}")  # fmt: skip
    for name, cpu_s in found["rays"]:
        print(f"Ray's {name:<30} CPU {cpu_s:5.1f} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    program.run(main)
