"""Scoring a prompt's pictures in batches, against one picture at a time, in one run.

    python scripts/bench_rewards.py --json rewards.json        # one card, two ViT-H-14 scorers
    python scripts/bench_rewards.py --tiny                     # the CPU, the quickstart's scorers

The true-size scorers have random weights, made on the device: no downloads. "One at a time" is the
published order: each picture goes through PIL and both towers by itself, under autocast on a card,
and its text is encoded again. Ours scores batches, preprocesses on the device, encodes each text
once, and has the scorers work beside each other. The largest difference of the scores is printed
beside the time.
"""

import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

import open_clip
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor
from torchvision.transforms import Compose, Normalize, ToTensor

import measuring
import program
from g2rpo_ray.rewards.scorers.clip_features import DTYPES, ClipFeatures
from g2rpo_ray.rewards.scorers.preprocess import ClipPreprocess, HpsPreprocess, to_device
from g2rpo_ray.tiny_world import assets_dir


@dataclass(frozen=True)
class Case:
    """What is scored."""

    architecture: str
    side: int
    """Height and width of the pictures."""
    pictures: int
    dtypes: tuple[str, ...]
    device: torch.device
    batch_size: int = 32


@dataclass(frozen=True)
class Scorer:
    """One CLIP model, to be asked in either way."""

    name: str
    model: Any
    tokenizer: Any
    one_picture: Callable[[Image.Image], Tensor]
    preprocess: Callable[[Tensor], Tensor]

    def encode_text(self, device: torch.device, prompt: str) -> Tensor:
        features: Tensor = self.model.encode_text(self.tokenizer([prompt]).to(device))[0]
        return features


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="the quickstart's scorers, on the CPU")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    options = parser.parse_args()
    if options.tiny:
        torch.set_num_threads(1)
        clip = f"local-dir:{assets_dir() / 'clip'}"
        case = Case(clip, 64, 24, ("float32", "bfloat16"), torch.device("cpu"))
    elif torch.cuda.is_available():
        # In this order: a model that was bfloat16 has lost what float16 would keep.
        dtypes = ("float32", "float16", "bfloat16")
        case = Case(measuring.SCORER, 720, 192, dtypes, torch.device("cuda"))
    else:
        raise SystemExit("no CUDA card; --tiny measures the quickstart's scorers on the CPU")
    result = measure(case, options.repeats)
    show(result)
    measuring.write_json(options.json, result)


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Seconds of both ways for all pictures and both scorers, and how far their scores differ."""
    pictures = measuring.soft_pictures(case.pictures, case.side)
    scorers = list(make_scorers(case.architecture, case.device))
    alone = partial(one_at_a_time, scorers, pictures, case.device)
    one_at_a_time(scorers, pictures[:4], case.device)
    singles = [measuring.timed(alone) for _ in range(repeats)]
    single_s, expected = min(seconds for seconds, _ in singles), singles[0][1]
    rows: list[dict[str, Any]] = []
    for dtype in case.dtypes:
        row, scores = time_batched(case, DTYPES[dtype], scorers, pictures, repeats)
        per_scorer_s = row["batched_s"] / len(pictures) / len(scorers)
        rows.append(
            {
                "dtype": dtype,
                **row,
                "ratio": single_s / row["batched_s"],
                "ms_per_picture_and_scorer": 1e3 * per_scorer_s,
                "max_abs_score_difference": float((scores - expected).abs().max()),
            }
        )
    on_cpu = f"cpu, {torch.get_num_threads()} threads"
    return {
        "device": on_cpu if case.device.type == "cpu" else measuring.card_name(case.device),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "torchvision", "open_clip_torch")},
        },
        "architecture": case.architecture,
        "scorers": [scorer.name for scorer in scorers],
        "pictures": len(pictures),
        "side": case.side,
        "batch_size": case.batch_size,
        "one_at_a_time_s": single_s,
        "score_spread": [float(column.std()) for column in expected.unbind(dim=1)],
        "batched": rows,
        "ratio": max(row["ratio"] for row in rows),
    }


def time_batched(
    case: Case, dtype: torch.dtype, scorers: list[Scorer], pictures: Tensor, repeats: int
) -> tuple[dict[str, float], Tensor]:
    """Seconds of our way and of its preprocessing, and the scores, float32 ``[B, scorers]``."""
    asked = [
        ClipFeatures(
            scorer.model.to(dtype).encode_image,
            partial(scorer.encode_text, case.device),
            scorer.preprocess,
            case.device,
            dtype,
        )
        for scorer in scorers
    ]
    score = partial(batched, asked, pictures, case.batch_size)
    score()
    runs = [measuring.timed(score) for _ in range(repeats)]

    def preprocess() -> None:
        for scorer in scorers:
            for part in pictures.split(case.batch_size):
                scorer.preprocess(to_device(part, case.device))

    seconds = {
        "batched_s": min(seconds for seconds, _ in runs),
        "preprocess_s": min(measuring.timed(preprocess)[0] for _ in range(repeats)),
    }
    for scorer in scorers:
        scorer.model.float()
    return seconds, runs[-1][1]


def make_scorers(architecture: str, device: torch.device) -> Iterator[Scorer]:
    """HPS and CLIP, with the model's own weights or random ones."""
    torch.manual_seed(0)
    own_weights = architecture.startswith("local-dir:")
    for name in ("hps", "clip"):
        # Random weights are drawn on the device: a processor takes half a minute for them.
        with device:
            model = open_clip.create_model(architecture, load_weights=own_weights, device=device)
        model.eval()
        settings = model.visual.preprocess_cfg
        tokenizer = open_clip.get_tokenizer(architecture)
        if name == "clip":
            one: Any = image_transform_v2(PreprocessCfg(**settings), is_train=False)
            yield Scorer(name, model, tokenizer, one, ClipPreprocess.of_open_clip(settings))
        else:
            side = model.visual.image_size[0]
            fitted = HpsPreprocess(side, [0.0] * 3, [1.0] * 3)
            # HPSv2's own steps, for one picture: tensor first, then resize, then normalise.
            one = Compose(
                [
                    ToTensor(),
                    lambda image, fit=fitted: fit(255 * image[None])[0],
                    Normalize(settings["mean"], settings["std"]),
                ]
            )
            ours = HpsPreprocess(side, settings["mean"], settings["std"])
            yield Scorer(name, model, tokenizer, one, ours)


@torch.inference_mode()
def one_at_a_time(scorers: list[Scorer], pictures: Tensor, device: torch.device) -> Tensor:
    """The published order: float32 ``[B, scorers]``."""
    scores = torch.zeros(len(pictures), len(scorers))
    half = torch.autocast("cuda", torch.float16) if device.type == "cuda" else nullcontext()
    for row, picture in enumerate(pictures):
        for column, scorer in enumerate(scorers):
            image = scorer.one_picture(Image.fromarray(picture.numpy()))[None].to(device)
            tokens = scorer.tokenizer([measuring.PROMPT]).to(device)
            with half:
                image_features = scorer.model.encode_image(image, normalize=True)
                text_features = scorer.model.encode_text(tokens, normalize=True)
            scores[row, column] = (image_features.float() * text_features.float()).sum().cpu()
    return scores


def batched(scorers: list[ClipFeatures], pictures: Tensor, batch_size: int) -> Tensor:
    """Ours: float32 ``[B, scorers]``; scorers work beside each other, as their servers do."""

    def score(scorer: ClipFeatures) -> Tensor:
        parts = pictures.split(batch_size)
        return torch.cat(
            [scorer.similarity(part, [measuring.PROMPT] * len(part)) for part in parts]
        )

    # PyTorch's number of threads belongs to the thread that sets it.
    with ThreadPoolExecutor(
        len(scorers), initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
    ) as servers:
        return torch.stack(list(servers.map(score, scorers)), dim=1)


def show(result: dict[str, Any]) -> None:
    """The result in words and as a Markdown table."""
    print(
        f"{result['pictures']} pictures of {result['side']}x{result['side']}, scorers "
        f"{' and '.join(result['scorers'])} ({result['architecture'].rpartition('/')[2]}), "
        f"{result['device']}, torch {result['versions']['torch']}, {result['date']}\n\n"
        f"one at a time: {result['one_at_a_time_s']:.3f} s; batches of {result['batch_size']}:\n"
    )
    measuring.print_table(result["batched"])
    spreads = ", ".join(f"{spread:.1e}" for spread in result["score_spread"])
    print(f"\nStandard deviation of the scores over the pictures: {spreads}")


if __name__ == "__main__":
    program.run(main)
