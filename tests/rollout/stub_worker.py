"""A rollout worker without a model, for actors that start soon: nothing heavy is imported here."""

import os
import signal
import time
from pathlib import Path

import ray
import torch

from g2rpo_ray.config import Config
from g2rpo_ray.models.weights import WeightReceipt
from g2rpo_ray.rollout.answers import BrokenLatentsError, HeldoutPictures, RolloutSummary
from g2rpo_ray.rollout.phases import REPORTS, OwnTime, Phase


class StubWorker:
    """Answers as a RolloutWorker would, and misbehaves as the prompt says, once or always."""

    def start(self, _config: Config, scoring: Path, _number: int) -> None:
        self.folder, self.weight_version = scoring, 0
        self.own_time = OwnTime()
        if (self.folder / "no start").exists():
            raise FileNotFoundError("no model here")

    def receive_weights(self, version: int, _weights: object = None) -> WeightReceipt:
        self.weight_version = version
        return WeightReceipt(version + int(self.once("garble")), 1, 1, "")

    @ray.method(concurrency_group=REPORTS)
    def phase(self) -> Phase:
        return self.own_time.now()

    @ray.method(concurrency_group=REPORTS)
    def export_weights(self) -> tuple[WeightReceipt, int]:
        return WeightReceipt(self.weight_version, 1, 1, ""), self.weight_version

    def rollout(self, prompt: str, group_id: int, iteration: int) -> tuple[RolloutSummary, str]:
        with self.own_time.task():
            return self.draw(prompt, group_id, iteration)

    def draw(self, prompt: str, group_id: int, _iteration: int) -> tuple[RolloutSummary, str]:
        *always, wish = prompt.split()
        broken = 0
        if not always and not self.once(f"{wish} {group_id}"):
            wish = "well"
        if wish == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if wish == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
            # Another thread may take the signal, and this one go on until that one runs.
            time.sleep(3600.0)
        if wish == "raise":
            raise ArithmeticError("a broken card")
        if wish == "nan":
            raise BrokenLatentsError("latents are not finite")
        if wish == "dropped":
            broken = 1
        if wish == "scored":
            with self.own_time.waiting(lambda: "reward 'judge'"):
                while not (self.folder / "scored").exists():
                    time.sleep(0.05)
        if wish == "hang":
            time.sleep(3600.0)
        if wish == "slow":
            time.sleep(1.0)
        with (self.folder / "done").open("a") as log:
            print(os.getpid(), group_id, self.weight_version, file=log)
        answered = group_id + (wish == "other")
        version = self.weight_version - (wish == "stale")
        summary = RolloutSummary(
            answered, version, 1, 1, {}, {}, [], [], 0.0, [], broken_pictures=broken
        )
        return summary, f"group {group_id}"

    def evaluate(self, prompt: str, *_: object) -> HeldoutPictures:
        pictures = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
        broken = int(prompt == "always broken" or self.once("broken"))
        return HeldoutPictures(0, prompt, pictures, {}, 1, broken_pictures=broken)

    def once(self, name: str) -> bool:
        """True for whoever asks first."""
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return name != "garble" or (self.folder / "may garble").exists()
