"""Scoring pictures that are there, by any rewards, a few at a time; a kill loses no more."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from g2rpo_ray.common.errors import RunError
from g2rpo_ray.common.files import name_text, replace_text, sole_writer
from g2rpo_ray.common.formatting import format_seconds
from g2rpo_ray.common.prompt_text import category_of, is_blank, metadata_of
from g2rpo_ray.common.stop import StopSignal
from g2rpo_ray.config.scoring import ScoringConfig
from g2rpo_ray.evaluation.scoring.captions import folder_pictures
from g2rpo_ray.evaluation.scoring.judges import Judge, Score, Unscored, judge_of
from g2rpo_ray.evaluation.scoring.pictures import (
    Found,
    Picture,
    PictureError,
    ScoreError,
    find_pictures,
    packed_pictures,
    unpack,
)
from g2rpo_ray.evaluation.scoring.report import Threshold, report
from g2rpo_ray.evaluation.scoring.results import OWN_COLUMNS, Results, Scored
from g2rpo_ray.prompts.reading import read_prompts
from g2rpo_ray.run.paths import check_outside_states

CHUNK, LARGEST_CHUNK, CHUNK_PX = 64, 512, 2**25
"""Pictures that are held at once: so many, then up to the end of a prompt's, but for the largest
number and size."""
FAILED_CHUNKS = 3
"""In a row, of which a scorer failed on every picture, before it is asked no more."""
LINE_S = 5.0
"""Between two lines about the progress."""
NO_PROMPT = "it has no prompt"
"""Why a picture has no score of a reward that reads prompts."""


Unpacked = tuple[Picture, Tensor | None, str]
"""A picture, its pixels, and why there are none."""
Answers = dict[str, list[Score]]


def score(
    config: ScoringConfig,
    pictures: Path,
    prompts: Path | None,
    folder: Path,
    thresholds: Sequence[Threshold] = (),
    on_ray: bool = False,
) -> str:
    """Score what ``folder`` lacks of ``pictures``; returns the report that it writes.

    Raises:
        ScoreError: pictures, captions or the folder cannot be used, or belong to other settings; or
            a reward has no score of any picture, such as for want of captions.
        RunError: a scorer failed again and again; the others' scores are written all the same.
    """
    rewards, told = list(config.rewards), list[str]()

    def tell(line: str) -> None:
        told.append(line)
        print(line, flush=True)

    _check_names(rewards, thresholds)
    found = find_pictures(pictures)
    if found.packed and prompts is not None:
        raise ScoreError(
            f"--prompts {prompts}: {pictures} is tar or parquet, whose captions are inside; leave "
            "--prompts out"
        )
    key = config.prompts.key
    texts = None if prompts is None else read_prompts(prompts, None, key)
    check_outside_states(folder, ScoreError, "--out")
    with sole_writer(folder, ScoreError, "--out"):
        results = Results(folder, _request(config, found, texts))
        servers = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:10]
        with (
            StopSignal("scores so far stay; the same command goes on from there") as stop,
            judge_of(config, f"score-{servers}" if on_ray else None) as judge,
        ):
            scoring = Scoring(judge, rewards, results, tell, stop.check, len(found.images))
            if found.packed:
                scoring.run(packed_pictures(found, str(key), tell))
            else:
                scoring.run(folder_pictures(found, texts, tell))
        names = list(scoring.names)
        if not names:
            raise ScoreError(f"{pictures}: 0 pictures in it")
        results.write_parquet(rewards, names)
        text = report(results, rewards, names, thresholds, told)
        replace_text(folder / "report.md", text)
        rows = [results.rows[name] for name in names]
        with_scores = {name for row in rows for name in row.scores}
        silent = {name: c for name, c in scoring.causes.items() if name not in with_scores}
        if failed := silent | scoring.given_up:
            causes = "; ".join(f"{name}: {cause}" for name, cause in failed.items())
            raise RunError(
                f"failed on every picture of {FAILED_CHUNKS} chunks in a row, or of all; the same "
                f"command tries again: {causes}. What there is lies in {folder}"
            )
        if without := [name for name in rewards if name not in with_scores]:
            raise ScoreError(
                f"{pictures}: {_why_none(without, rows)}. What there is lies in {folder}"
            )
        return text


def _why_none(rewards: Sequence[str], rows: Sequence[Scored]) -> str:
    """What keeps every picture from a score of these rewards, most of them at least."""
    causes = [row.problems.get(name) or row.problems[""] for row in rows for name in rewards]
    cause = Counter(causes).most_common(1)[0][0]
    hint = (
        ": give --prompts FILE, or a .txt of its name beside each picture (in tar files .txt or "
        ".json, in parquet a column; prompts.key=NAME names key or column)"
    )
    return f"no picture has a score of {', '.join(rewards)}: {cause}{hint * (NO_PROMPT in causes)}"


def _check_names(rewards: Sequence[str], thresholds: Sequence[Threshold]) -> None:
    for name in set(rewards) & set(OWN_COLUMNS):
        raise ScoreError(f"reward {name!r}: scores.parquet has a column of that name; rename it")
    for name, _ in thresholds:
        if name not in rewards:
            raise ScoreError(f"--threshold {name}: no such reward; there are {', '.join(rewards)}")


def _request(
    config: ScoringConfig, found: Found, prompts: Sequence[str] | None
) -> dict[str, object]:
    digest = hashlib.sha256()
    for prompt in prompts or []:
        digest.update(json.dumps([prompt, dict(metadata_of(prompt))], default=str).encode())
    return {
        "pictures": str(found.folder.absolute()),
        "files": {name_text(file.name): file.stat().st_size for file in found.packed},
        "prompts": digest.hexdigest() if prompts is not None else None,
        "key": config.prompts.key,
        "rewards": {
            name: {"kind": reward.kind, "options": reward.options}
            for name, reward in config.rewards.items()
        },
    }


@dataclass
class Scoring:
    """One pass over pictures."""

    judge: Judge
    rewards: Sequence[str]
    results: Results
    tell: Callable[[str], None]
    check: Callable[[], None]
    """Called between two chunks; may raise to stop."""
    total: int
    """Pictures, where they can be counted; else 0."""
    names: dict[str, None] = field(default_factory=dict)
    """Every picture that was met, in order."""
    given_up: dict[str, str] = field(default_factory=dict)
    """Rewards that are asked no more, with the last cause."""
    failed_chunks: Counter[str] = field(default_factory=Counter)
    causes: dict[str, str] = field(default_factory=dict)
    """Rewards that failed on a picture, with the last cause."""
    new: int = 0
    """Pictures that were scored in this pass."""

    def run(self, pictures: Iterator[Picture]) -> None:
        """Score what has no scores yet."""
        self.started_s = self.told_s = time.monotonic()
        chunk: list[Unpacked] = []
        area_px = 0
        for picture in pictures:
            if picture.name in self.names:
                self.tell(f"{picture.name}: there is one of this name already; left out")
                continue
            self.names[picture.name] = None
            if all(name in self.results.scores_of(picture) for name in self.rewards):
                continue
            ends = bool(chunk) and chunk[-1][0].prompt != picture.prompt
            full = len(chunk) >= (CHUNK if ends else LARGEST_CHUNK) or area_px >= CHUNK_PX
            if full:
                self._score(chunk)
                chunk, area_px = [], 0
            chunk.append((picture, *_unpacked(picture)))
            pixels = chunk[-1][1]
            area_px += pixels.shape[1] * pixels.shape[2] if pixels is not None else 0
        if chunk:
            self._score(chunk)
        self._progress(last=True)

    def _score(self, chunk: Sequence[Unpacked]) -> None:
        scores = [dict(self.results.scores_of(picture)) for picture, _, _ in chunk]
        problems = [{"": problem} if problem else {} for _, _, problem in chunk]
        places = {name: list[int]() for name in self.rewards}
        for name in self.rewards:
            reads = self.judge.reads_prompts(name)
            for place, (picture, pixels, _) in enumerate(chunk):
                if pixels is None or name in scores[place]:
                    continue
                if name in self.given_up:
                    problems[place][name] = f"not asked: {self.given_up[name]}"
                elif reads and picture.prompt is None:
                    problems[place][name] = picture.no_prompt or NO_PROMPT
                elif reads and is_blank(picture.prompt or ""):
                    problems[place][name] = "the prompt is empty"
                else:
                    places[name].append(place)
        for name, answers in self._ask(chunk, places).items():
            for place, answer in zip(places[name], answers, strict=True):
                if isinstance(answer, Unscored):
                    problems[place][name] = answer.cause or _no_answer(chunk[place][0])
                else:
                    scores[place][name] = answer
        rows = [
            Scored(
                picture.name, picture.stamp, picture.prompt,
                category_of(picture.prompt or ""), scores[place], problems[place],
            )
            for place, (picture, _, _) in enumerate(chunk)
        ]  # fmt: skip
        self.results.add(rows)
        self.new += len(chunk)
        self._progress()
        self.check()

    def _ask(self, chunk: Sequence[Unpacked], places: Mapping[str, Sequence[int]]) -> Answers:
        """Scores of the pictures at ``places`` by reward; of those that failed all too often none
        is asked again."""
        asked = {
            name: [
                (pixels, picture.prompt or "")
                for picture, pixels, _ in (chunk[place] for place in wanted)
                if pixels is not None
            ]
            for name, wanted in places.items()
            if wanted
        }
        answers = self.judge.scores(asked)
        for name, scores in answers.items():
            failures = [it.cause for it in scores if isinstance(it, Unscored) and it.cause]
            if failures:
                self.causes[name] = failures[-1]
            if len(failures) < len(scores):
                self.failed_chunks[name] = 0
                continue
            self.failed_chunks[name] += 1
            if self.failed_chunks[name] == FAILED_CHUNKS:
                self.given_up[name] = failures[-1]
                self.tell(f"{name} is asked no more: {failures[-1]}")
        return answers

    def _progress(self, last: bool = False) -> None:
        now_s = time.monotonic()
        if not last and now_s - self.told_s < LINE_S:
            return
        self.told_s = now_s
        rate = self.new / max(now_s - self.started_s, 1e-9)
        left = max(self.total - len(self.names), 0)
        line = f"{len(self.names)}{f' of {self.total}' if self.total else ''} pictures"
        if self.new:
            line += f", {rate:.1f} a second"
        if left and rate:
            line += f", {format_seconds(left / rate)} left"
        print(line, flush=True)


def _no_answer(picture: Picture) -> str:
    """Often for want of metadata that the scorer reads."""
    known = ", ".join(metadata_of(picture.prompt or "")) or "none"
    return f"no answer (NaN or infinite); metadata of its prompt: {known}"


def _unpacked(picture: Picture) -> tuple[Tensor | None, str]:
    """A picture's pixels, or why there are none."""
    try:
        return unpack(picture.read()), ""
    except (OSError, PictureError) as error:
        return None, str(error)
