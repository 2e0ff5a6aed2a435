"""A user's scorer that does what a prompt's first word tells it to."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from g2rpo_ray.common.prompt_text import metadata_of
from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import RewardScorer

HANG_S = 2.0
STUCK_S = 3600.0


class ObedientScorer(RewardScorer):
    """Scores the mean brightness, or fails in the way that is asked for."""

    class Options(Section):
        """Settings of the scorer."""

        log: str
        """File that gets a line for each call: number of pictures and the prompts in it."""

    kind = "obedient"
    reads_prompts = False

    def __init__(self, options: Section, device: str) -> None:  # noqa: ARG002
        assert isinstance(options, self.Options)
        self._log = Path(options.log)

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        with self._log.open("a") as log:
            print(len(pictures), *sorted(set(prompts)), sep="\t", file=log)
        brightness = pictures.float().mean(dim=(1, 2, 3)) / 255
        wishes = {prompt.partition(" ")[0] for prompt in prompts}
        if "raise" in wishes:
            raise ZeroDivisionError("the scorer's own bug")
        if "late" in wishes:
            time.sleep(0.2)
            raise TimeoutError("after a while")
        if "once" in wishes and self._calls_of("once") == 1:
            raise ConnectionError("only the first time")
        if "stick" in wishes and self._calls_of("stick") == 1:
            time.sleep(STUCK_S)
        if "hold" in wishes:
            while not self._log.with_name("release").exists():
                time.sleep(0.05)
        if "hang" in wishes:
            time.sleep(HANG_S)
        if "metadata" in wishes:
            return torch.tensor([metadata_of(prompt)["levels"][0] for prompt in prompts])
        if "nan" in wishes:
            brightness[0] = torch.nan
        if "infinite" in wishes:
            brightness[-1] = torch.inf
        if "shape" in wishes:
            return brightness[:, None]
        if "few" in wishes:
            return brightness[1:]
        if "type" in wishes:
            return brightness.tolist()  # type: ignore[return-value]
        if "double" in wishes:
            return brightness.double()
        return brightness

    def _calls_of(self, word: str) -> int:
        return sum(f"\t{word}" in line for line in self._log.read_text().splitlines())


class SlowScorer(RewardScorer):
    """Scores the mean brightness, and takes its time for it."""

    class Options(Section):
        """Settings of the scorer."""

        seconds: float

    kind = "slow"

    def __init__(self, options: Section, device: str) -> None:  # noqa: ARG002
        assert isinstance(options, self.Options)
        self._seconds = options.seconds

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:  # noqa: ARG002
        time.sleep(self._seconds)
        return pictures.float().mean(dim=(1, 2, 3)) / 255


class ParentScorer(RewardScorer):
    """Ends a process of its own by SIGTERM at each request, as pools of processes do."""

    kind = "parent"
    reads_prompts = False

    def __init__(self, options: Section, device: str) -> None:
        pass

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:  # noqa: ARG002
        with subprocess.Popen(["sleep", "60"]) as child:
            child.terminate()
            child.wait(timeout=10)
        return pictures.float().mean(dim=(1, 2, 3)) / 255


class ChoosyScorer(RewardScorer):
    """Scores 1 where no kernel is chosen by its time."""

    kind = "choosy"
    reads_prompts = False

    def __init__(self, options: Section, device: str) -> None:
        pass

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:  # noqa: ARG002
        return torch.full((len(pictures),), float(torch.backends.cudnn.deterministic))


class CountingScorer(RewardScorer):
    """Scores how many pictures it sees at a time: one that compares them."""

    kind = "counting"
    compares_pictures = True

    def __init__(self, options: Section, device: str) -> None:
        pass

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        time.sleep(0.2)
        return torch.full((len(prompts),), float(len(pictures)))


class DyingScorer(RewardScorer):
    """Its process is killed while it starts, as often as its file has not got a line for it."""

    class Options(Section):
        """Settings of the scorer."""

        log: str
        deaths: int

    kind = "dying"
    reads_prompts = False

    def __init__(self, options: Section, device: str) -> None:  # noqa: ARG002
        assert isinstance(options, self.Options)
        with Path(options.log).open("a+") as log:
            print("start", file=log, flush=True)
            log.seek(0)
            if len(log.readlines()) <= options.deaths:
                os.kill(os.getpid(), signal.SIGKILL)

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:  # noqa: ARG002
        return pictures.float().mean(dim=(1, 2, 3)) / 255


class LateScorer(RewardScorer):
    """Starts when its file is there."""

    class Options(Section):
        """Settings of the scorer."""

        file: str

    kind = "late"
    reads_prompts = False

    def __init__(self, options: Section, device: str) -> None:  # noqa: ARG002
        assert isinstance(options, self.Options)
        while not Path(options.file).exists():
            time.sleep(0.1)

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:  # noqa: ARG002
        return pictures.float().mean(dim=(1, 2, 3)) / 255


class NoScorer:
    """Has the method, but is no RewardScorer."""

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:  # noqa: ARG002
        return torch.zeros(len(pictures))


class Light(RewardScorer):
    """Mean brightness of each picture, or its opposite."""

    class Options(Section):
        """Settings of the scorer."""

        sign: float = 1.0

    kind = "light"
    reads_prompts = False

    def __init__(self, options: Section, device: str) -> None:  # noqa: ARG002
        assert isinstance(options, self.Options)
        self._sign = options.sign

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:  # noqa: ARG002
        return self._sign * pictures.float().mean(dim=(1, 2, 3)) / 255
