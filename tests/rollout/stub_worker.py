"""A rollout worker without a model, for actors that start soon: nothing heavy is imported here."""

import os
import signal
import time
from pathlib import Path

import torch

from g2rpo_ray.config import Config
from g2rpo_ray.rollout.answers import BrokenLatentsError, HeldoutPictures, RolloutSummary


class StubWorker:
    """Answers as a RolloutWorker would, and misbehaves as the prompt says, once or always."""

    def start(self, _config: Config, scoring: Path, _number: int) -> None:
        self.folder, self.weight_version = scoring, 0
        if (self.folder / "no start").exists():
            raise FileNotFoundError("no model here")

    def receive_weights(self, version: int) -> int:
        self.weight_version = version
        return version + int(self.once("garble"))

    def rollout(self, prompt: str, group_id: int, _iteration: int) -> tuple[RolloutSummary, str]:
        *always, wish = prompt.split()
        broken = 0
        if not always and not self.once(f"{wish} {group_id}"):
            wish = "well"
        if wish == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if wish == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if wish == "raise":
            raise ArithmeticError("a broken card")
        if wish == "nan":
            raise BrokenLatentsError("latents are not finite")
        if wish == "dropped":
            broken = 1
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
