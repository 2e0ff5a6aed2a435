"""What the driver and the rollout pool cost for each group, with the networks' work left out.

    python scripts/bench_driver.py --groups 10000

Real are: the pool, its dispatch and deadlines, and every call through Ray with its answer. The
workers are simulated: a handful of asynchronous actors answer for all of them, since hundreds of
processes do not fit on one machine, and a group's work is a sleep. The sleep grows with the number
of workers, so that every row has the same load in groups per second.
"""

import asyncio
import itertools
import time
from functools import partial
from statistics import median

import psutil
import ray

import measuring
import program
from g2rpo_ray.rollout.answers import RolloutSummary
from g2rpo_ray.rollout.pool import RolloutPool

ACTORS = 4
RATE = 200.0
"""Groups a second, offered."""
ITERATION_S, ITERATION_GROUPS = 100.0, 16
"""Of a true-size iteration."""


class Stub:
    """Answers for many workers; the group's work is a sleep."""

    async def start(self, *_: object) -> None:
        pass

    async def rollout(
        self, work_s: float, group_id: int, _iteration: int
    ) -> tuple[RolloutSummary, tuple[float, float]]:
        started_s = time.monotonic()
        await asyncio.sleep(work_s)
        summary = RolloutSummary(group_id, 0, 1, 1, {}, {}, [], [], 0.0, [])
        return summary, (started_s, time.monotonic())


def bench(workers: int, groups: int) -> dict[str, float]:
    """One row."""
    config = measuring.run_config(
        ["run_dir=/tmp/unused", f"rollout.workers={workers}", "rollout.timeout_s=600"]
    )
    stubs = [
        ray.remote(Stub).options(num_cpus=0, max_concurrency=1000).remote() for _ in range(ACTORS)
    ]
    ray.get([stub.start.remote() for stub in stubs])
    hired = itertools.cycle(stubs)
    pool = RolloutPool(config, None, hire=lambda _avoided: next(hired))  # type: ignore[arg-type]
    pool.wait_until_ready()
    work = ray.put(workers / RATE)
    process = psutil.Process()
    before_rss, before_cpu_s = process.memory_info().rss, time.process_time()
    draw = partial(pool.generate, [work] * groups, 0, lambda *_: None)
    wall_s, (_, references) = measuring.timed(draw)
    cpu_s = time.process_time() - before_cpu_s
    rss = process.memory_info().rss
    times = sorted(ray.get(references))
    # With W at work, a worker's next start comes as the answer of W groups before has gone round.
    ends = sorted(end for _, end in times)
    starts = [start for start, _ in times][workers:]
    turnarounds = sorted(start - end for start, end in zip(starts, ends, strict=False))
    for stub in stubs:
        ray.kill(stub)
    return {
        "workers": workers,
        "groups": groups,
        "driver_cpu_ms_per_group": round(1000 * cpu_s / groups, 3),
        "groups_per_s": round(groups / wall_s, 1),
        "turnaround_ms_median": round(1000 * median(turnarounds), 2),
        "turnaround_ms_p99": round(1000 * turnarounds[int(0.99 * len(turnarounds))], 2),
        "memory_kib_per_group": round((rss - before_rss) / groups / 1024, 2),
        "driver_rss_gib": round(rss / measuring.GIB, 3),
    }


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512])
    options = parser.parse_args()
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR",
    )  # fmt: skip
    bench(8, 500)  # Ray's first calls cost more.
    rows = [bench(workers, options.groups) for workers in options.workers]
    measuring.print_table(rows)
    costs = [row["driver_cpu_ms_per_group"] for row in rows]
    share = max(costs) / 1000 * ITERATION_GROUPS / ITERATION_S
    print(
        f"largest to smallest cost: {max(costs) / min(costs):.2f}; share of an iteration of "
        f"{ITERATION_GROUPS} prompts and {ITERATION_S:g} s: {100 * share:.4f} %"
    )
    measuring.write_json(options.json, {"rows": rows, "iteration_share": share})
    ray.shutdown()


if __name__ == "__main__":
    program.run(main)
