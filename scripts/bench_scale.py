"""Whole iterations of true-size FLUX.1-dev with random weights, through the run's own roles.

    python scripts/bench_scale.py --setup one_card --json one_card.json
    python scripts/bench_scale.py --setup four_cards --json four_cards.json
    python scripts/bench_scale.py --setup four_cards --tiny --json tiny.json    # CPUs, gloo
    python scripts/bench_scale.py --setup four_cards --tiny --heads 24 --stages sync,checkpoint \
        --json memory.json weight_sync.bucket_mib=32

``one_card``: LoRA; rollout worker, learner rank and reward server share a card by fractions.
``four_cards``: all weights; two ZeRO-3 ranks and two rollout workers, each on its own card, and a
reward server that has a tenth of a worker's. Members and SDE steps are reduced; ``key=value``
overrides any setting. The file is written after every stage; one that
takes too long ends the process, which then says where it stood.
"""

import argparse
import faulthandler
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch

import measuring
import program
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo
from g2rpo_ray.learner.worker import Learner
from g2rpo_ray.plan.memory import LEARNER_FORWARDS, learner_pass_name
from g2rpo_ray.plan.networks import policy_size
from g2rpo_ray.training.roles import Roles, launch

STAGES = "sync,pass,iteration,checkpoint"


class Bench:
    """The stages of one setup; what was measured is written after every stage."""

    batches: tuple[int, ...] = (1, 4)
    """Latents of a learner pass."""

    def __init__(self, config: Config, path: Path, facts: dict[str, Any]) -> None:
        self.config, self.path = config, path
        self.content = facts | {"stages": {}}
        name = learner_pass_name(config.model.lora is not None, config.model.gradient_checkpointing)
        self.pass_tflop = LEARNER_FORWARDS[name] * policy_size(config).evaluation.tflop
        self.roles: Roles

    def run(self, stages: list[str]) -> None:
        """All stages asked for; the roles end with it."""
        with ExitStack() as stack:
            with self.stage("start", 420) as found:
                started_s = time.perf_counter()

                def note(text: str) -> None:
                    print(f"  {time.perf_counter() - started_s:.1f} s: {text}")

                self.roles = stack.enter_context(launch(self.config, None, note))
                found["trained"] = self.roles.learner.coverage
            known = {
                "sync": self.sync,
                "pass": self.learner_pass,
                "iteration": self.iterations,
                "checkpoint": self.checkpoint,
            }
            for name in stages:
                known[name]()

    @contextmanager
    def stage(self, name: str, limit_s: float) -> Iterator[dict[str, Any]]:
        """Time a stage and keep what it puts into the dictionary; at its limit, end the process.

        Peaks of memory since the last stage, GiB: on the card by PyTorch's count, in the process.
        """
        print(f"{name} (at most {limit_s:g} s):")
        found: dict[str, Any] = {}
        started_s = time.perf_counter()
        faulthandler.dump_traceback_later(limit_s, exit=True)
        try:
            yield found
            found["memory_gib"] = self.ask(_memory)
        except BaseException as error:
            found["failed"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
            found["wall_s"] = time.perf_counter() - started_s
            found |= {k: float(f"{v:.5g}") for k, v in found.items() if isinstance(v, float)}
            self.content["stages"][name] = found
            measuring.write_json(self.path, self.content)
            for key, value in found.items():
                print(f"  {key}: {json.dumps(value)}")

    def sync(self) -> None:
        """The first forms the group; the others are what a run pays in every iteration."""
        with self.stage("sync", 120) as found:
            sync = self.roles.sync
            times, reports = zip(*(measuring.timed(sync) for _ in range(5)), strict=True)
            report = reports[-1]
            # Not in the timed ones: looking every 2 ms takes the roles' interpreters from them.
            for number in range(2):
                with self.host_memory(found, f"host_mib of sync {number}"):
                    sync()
            found["bucket_mib"] = self.config.weight_sync.bucket_mib
            found["seconds"] = [round(seconds, 4) for seconds in times]
            found["tensors"], found["bytes"] = report.tensors, report.bytes
            found["gb_per_s"] = report.bytes / median(times[1:]) / 1e9
            found["checksum"] = report.checksum

    def learner_pass(self) -> None:
        """Forward and backward, accumulating, as between two optimizer steps."""
        for batch in self.batches:
            with self.stage(f"learner pass, batch {batch}", 150) as found:
                ranks = self.roles.learner.ranks
                found |= ray.get([r.__ray_call__.remote(_time_passes, batch) for r in ranks])[0]
                found["tflop"] = self.pass_tflop * batch
                found["tflop_per_s"] = found["tflop"] / median(found["pass_s"])
                found["share_of_matrix_rate"] = found["tflop_per_s"] / found["matrix"]

    def iterations(self) -> None:
        """Generate, learn, sync: the first warms up (compilation, buffers)."""
        for number in range(2):
            self.iteration(number)

    def iteration(self, number: int) -> None:
        roles = self.roles
        with self.stage(f"iteration {number}", 240) as found:
            count = self.config.sampling.prompts_per_iteration
            texts = [f"{measuring.PROMPT} {n}" for n in range(count)]
            prompts = roles.encoder.training(list(enumerate(texts)))
            started_s = time.perf_counter()
            draw = partial(roles.pool.generate, prompts, number, lambda *_: None)
            found["generate_s"], (summaries, groups) = measuring.timed(draw)
            found["evaluations"] = sum(s.evaluations for s in summaries)
            found["pictures"] = sum(s.pictures for s in summaries)
            # On the worker's device, of all prompts: without decoding, and waiting for scores.
            for phase in ("denoise_s", "decode_s"):
                found[phase] = sum(s.seconds[phase] for s in summaries)
            learn = partial(roles.learner.update, groups)
            found["learn_s"], update = measuring.timed(learn)
            found["passes"] = len(update.records)
            found["first_max_abs_log_ratio"] = max(
                r.health.max_abs_log_ratio for r in update.records if r.update == 0
            )
            found["grad_norms"] = update.grad_norms
            found["sync_s"], report = measuring.timed(roles.sync)
            found["weights_checksum"] = report.checksum
            found["iteration_s"] = time.perf_counter() - started_s

    def checkpoint(self) -> None:
        """Until it is copied, and until it is whole on the disk and checked."""
        with self.stage("checkpoint", 400) as found:
            kind = "full" if self.config.model.lora is None else "lora"
            info = CheckpointInfo(1, 1, 1, 0, 0.0, kind, 0)
            folder = checkpoint_folder(Path(self.config.run_dir), 1)
            # The first save takes its memory; a run's others find it there.
            found["blocked_s"], found["seconds"] = [], []
            for number in range(2):
                # Two of true size would not fit on every disk.
                shutil.rmtree(folder, ignore_errors=True)
                with self.host_memory(found, f"host_mib of save {number}"):
                    started_s = time.perf_counter()
                    self.roles.learner.save(folder, info)
                    found["blocked_s"].append(round(time.perf_counter() - started_s, 3))
                    self.roles.learner.finish_save()
                    found["seconds"].append(round(time.perf_counter() - started_s, 3))
            found["bytes"] = sum(file.stat().st_size for file in folder.iterdir())
            shard = sum(file.stat().st_size for file in folder.glob("*-00000.safetensors"))
            found["shard_mib"] = shard / 2**20

    @contextmanager
    def host_memory(self, found: dict[str, Any], key: str) -> Iterator[None]:
        """Adds each process's anonymous memory in MiB: before, at most, and what that is more."""
        self.ask(_begin_watch)
        yield
        found[key] = self.ask(_end_watch)

    def ask(self, question: Callable[[Any], Any]) -> dict[str, Any]:
        """The answer of every rollout worker and learner rank."""
        named = {f"rollout worker {n}": one for n, one in enumerate(self.roles.pool.workers)}
        named |= {f"learner rank {n}": rank for n, rank in enumerate(self.roles.learner.ranks)}
        answers = ray.get([handle.__ray_call__.remote(question) for handle in named.values()])
        return dict(zip(named, answers, strict=True))


class _HostWatch(threading.Thread):
    """Samples its process's anonymous memory: pages of mapped files are the page cache's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = _process_mib("RssAnon")
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.002):
            self.most = max(self.most, _process_mib("RssAnon"))


def _process_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[key].split()[0]) / 2**10


def _begin_watch(role: Any) -> None:
    """Runs inside a role."""
    role.host_watch = _HostWatch()
    role.host_watch.start()


def _end_watch(role: Any) -> dict[str, float]:
    """Runs inside a role."""
    watch = role.host_watch
    watch.ended.set()
    watch.join()
    found = {"steady": watch.before, "peak": watch.most, "above": watch.most - watch.before}
    return {key: round(value, 1) for key, value in found.items()}


def _memory(_role: object) -> dict[str, float]:
    """Runs inside a role."""
    found = {"host_peak": _process_mib("VmHWM") / 2**10}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["allocated_peak"] = torch.cuda.max_memory_allocated() / measuring.GIB
        found["reserved_peak"] = torch.cuda.max_memory_reserved() / measuring.GIB
        found["whole_card_now"] = (total - free) / measuring.GIB
        torch.cuda.reset_peak_memory_stats()
    return {key: round(value, 2) for key, value in found.items()}


def _time_passes(learner: Learner, batch: int) -> dict[str, Any]:
    """Runs inside a learner rank."""
    engine, device = learner.engine, learner.device
    policy = engine.policy
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    text_tokens = learner.config.prompts.max_sequence_length
    embeds = measuring.random_conditioning(policy.family, policy.transformer, text_tokens, dtype)
    x = torch.randn(batch, *policy.shape.packed, device=device)
    sigma = torch.full((batch,), 0.5, device=device)
    predict = partial(engine, x, sigma, embeds.to(device))

    def differentiate(last: bool = False) -> None:
        engine.backward(predict().square().mean(), last=last)

    def seconds(run: Callable[[], object]) -> list[float]:
        return [round(measuring.timed(run)[0], 5) for _ in range(7)][2:]

    side = 8192 if device.type == "cuda" else 512
    matrix_s = measuring.matrix_s(side, dtype, device, repeats=20)
    found: dict[str, Any] = {"matrix": round(2e-12 * side**3 / matrix_s, 2)}
    found["evaluation_s"] = seconds(torch.no_grad()(predict))
    found["pass_s"] = seconds(differentiate)
    # Ends the accumulation; a run steps after its last pass, too.
    differentiate(last=True)
    found["step_s"] = measuring.timed(engine.step)[0]
    # Last: it leaves the card hot.
    row_s = measuring.matrix_s_in_a_row(side, dtype, device, for_s=4 if side > 512 else 0.2)
    found["matrix_in_a_row"] = round(2e-12 * side**3 / row_s, 2)
    return found


def make_config(options: argparse.Namespace, scratch: Path) -> tuple[Config, list[str]]:
    """The quickstart's settings, turned into the setup's."""
    model = measuring.write_model_folder(scratch / "flux", options.tiny)
    if options.heads is not None:
        architecture = model / "transformer" / "config.json"
        measuring.change_json(architecture, {"num_attention_heads": options.heads})
    overrides = measuring.settings("random_weights", "scale", options.setup)
    if not options.tiny:
        overrides += measuring.settings(
            "true_size", "scale_true_size", f"{options.setup}_true_size"
        )
        scorer = measuring.write_scorer(scratch / "hps.pt")
        overrides += [f"rewards.hps.options={json.dumps(scorer)}"]
    overrides += [f"model.path={model}", f"run_dir={scratch / 'run'}", *options.overrides]
    # One reward is enough, and the others know only the tiny world's prompts.
    return measuring.run_config(overrides, ["hps"]), overrides


def main() -> int:
    """Returns 1 if a stage failed; what was measured before is in the file all the same."""
    parser = measuring.make_parser(__doc__, needs_file=True)
    parser.add_argument("--setup", choices=["one_card", "four_cards"], required=True)
    parser.add_argument("--tiny", action="store_true", help="the quickstart's size, on CPUs")
    parser.add_argument("--heads", type=int, help="attention heads: a wider network")
    parser.add_argument("--stages", default=STAGES, help=f"some of {STAGES}, in any order")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print("writing the model folder")
        config, overrides = make_config(options, Path(scratch))
        card = measuring.card_name(torch.device("cpu" if options.tiny else "cuda"))
        facts = {"setup": options.setup, "overrides": overrides, "card": card}
        facts["torch"] = torch.__version__
        try:
            Bench(config, options.json, facts).run(options.stages.split(","))
        except Exception as error:  # noqa: BLE001  (a stage's failure is a result, too)
            print(f"failed: {type(error).__name__}: {error}")
            return 1
    print("all stages done")
    return 0


if __name__ == "__main__":
    program.run(main)
