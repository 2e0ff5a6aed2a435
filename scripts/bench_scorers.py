"""Pictures a second of a scorer on this machine.

    python scripts/bench_scorers.py ocr --side 512 --threads 2      # drawn signs, on the CPU
    python scripts/bench_scorers.py composition           # one card, random true-size models
    python scripts/bench_scorers.py hpsv3                 # the same; writes 15 GB
    python scripts/bench_scorers.py hpsv3 --tiny --side 64 --pictures 4      # on the CPU

A passage before the measured ones warms up. Beside the wall clock stands the processor time of a
picture, which others on the machine change less.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from transformers import CLIPTokenizer, Owlv2Config, Owlv2ForObjectDetection, Owlv2ImageProcessor

import measuring
import program
from g2rpo_ray.common.prompt_text import PromptText
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorers.pictures import as_pictures
from g2rpo_ray.tiny_world import assets_dir
from random_hpsv3 import PUBLISHED, SMALL, write_hpsv3

WORDS = ("Fresh Bread", "OPEN 24h", "Fox & Friends", "Exit", "Happy Birthday", "Café")
TWO_COLOURS = {
    "include": [
        {"class": "bench", "count": 1, "color": "red"},
        {"class": "clock", "count": 1, "color": "blue"},
    ]
}
COLOUR_CLIP = "ViT-L-14-quickgelu"
DTYPES = {"composition": "float16", "hpsv3": "bfloat16"}
"""On a card; as docs/rewards.md advises."""


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("kind", choices=["ocr", "composition", "hpsv3"])
    parser.add_argument("--side", type=int, default=720, help="height and width of the pictures")
    parser.add_argument("--pictures", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    print(", ".join(f"{key} {value}" for key, value in result.items()))
    measuring.write_json(options.json, result)


def measure(options: Any, folder: Path) -> dict[str, Any]:
    started_s = time.perf_counter()
    pictures, words = signs(options.pictures, options.side)
    if options.kind == "ocr":
        scorer, device = make_scorer("ocr", {}, "cpu"), "cpu"
        prompts = [f'a sign that says "{word}"' for word in words]
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        write = detector_and_clip if options.kind == "composition" else hpsv3
        settings = write(folder, device, options.tiny)
        settings["dtype"] = DTYPES[options.kind] if device == "cuda" else "float32"
        print(f"files written after {time.perf_counter() - started_s:.1f} s", flush=True)
        scorer = make_scorer(options.kind, settings, device)
        print(f"scorer loaded after {time.perf_counter() - started_s:.1f} s", flush=True)
        prompts = [PromptText("a photo", TWO_COLOURS)] * len(words)
    size, runs = options.batch_size, []
    scorer.score(pictures[:size], prompts[:size])
    for _ in range(options.repeats):
        wall_s, cpu_s, scores = time.perf_counter(), time.process_time(), []
        for first in range(0, len(pictures), size):
            last = first + size
            scores.append(scorer.score(pictures[first:last], prompts[first:last]))
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        runs.append((wall_s, cpu_s))
    wall_s, cpu_s = map(min, zip(*runs, strict=True))
    return {
        "kind": options.kind,
        "device": measuring.card_name(torch.device(device)) if device == "cuda" else "cpu",
        "threads": options.threads,
        "side": options.side,
        "pictures": len(pictures),
        "seconds": round(wall_s, 3),
        "pictures_per_s": round(len(pictures) / wall_s, 2),
        "processor_s_per_picture": round(cpu_s / len(pictures), 4),
        "mean_score": round(float(torch.cat(scores).mean()), 4),
    }


def signs(count: int, side: int) -> tuple[Tensor, list[str]]:
    """Pictures with a word each, on a ground of soft colours, and the words."""
    drawn, words = [], [WORDS[number % len(WORDS)] for number in range(count)]
    for ground, word in zip(measuring.soft_pictures(count, side, 0.4), words, strict=True):
        picture = Image.fromarray(ground.numpy())
        brush, face = ImageDraw.Draw(picture), ImageFont.load_default(side // 10)
        brush.text((side // 2, side // 2), word, font=face, fill=(20, 20, 60), anchor="mm")
        drawn.append(picture)
    return as_pictures(drawn), words


def detector_and_clip(folder: Path, device: str, tiny: bool) -> dict[str, Any]:
    """Options of a scorer with owlv2-base-patch16-ensemble's and GenEval's CLIP's sizes."""
    torch.manual_seed(0)
    side, tower = (96, {"num_hidden_layers": 2}) if tiny else (960, {})
    with torch.device(device):
        # As published, but for the vocabulary, which the tiny world's tokenizer has.
        config = Owlv2Config(
            text_config={"vocab_size": 567, "bos_token_id": 565, "eos_token_id": 566},
            vision_config={"image_size": side} | tower,
        )
        detector = Owlv2ForObjectDetection(config)
    detector.save_pretrained(folder)
    CLIPTokenizer.from_pretrained(assets_dir() / "clip").save_pretrained(folder)
    Owlv2ImageProcessor(size={"height": side, "width": side}).save_pretrained(folder)
    if tiny:
        return {"detector": str(folder), "clip": "local-dir:tiny_world:clip"}
    clip = open_clip.create_model(COLOUR_CLIP, load_weights=False, device=device)
    torch.save(clip.state_dict(), folder / "clip.pt")
    checkpoint = str(folder / "clip.pt")
    return {"detector": str(folder), "clip": COLOUR_CLIP, "clip_checkpoint": checkpoint}


def hpsv3(folder: Path, device: str, tiny: bool) -> dict[str, Any]:
    """Options of a scorer with HPSv3's sizes but for the vocabulary. Its tokenizer knows the
    question by heart, word by word, and makes about as many tokens of it as Qwen2-VL's."""
    return write_hpsv3(folder, SMALL if tiny else PUBLISHED, 2000, device)


if __name__ == "__main__":
    program.run(main)
