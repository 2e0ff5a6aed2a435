"""Pictures a second of a scorer on this machine.

    python scripts/bench_scorers.py ocr --side 512 --threads 2      # drawn signs, on the CPU
    python scripts/bench_scorers.py composition           # one card, random true-size models

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
from g2rpo_ray.common.prompt_text import PromptText
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorers.pictures import as_pictures
from g2rpo_ray.tiny_world import assets_dir

WORDS = ("Fresh Bread", "OPEN 24h", "Fox & Friends", "Exit", "Happy Birthday", "Café")
TWO_COLOURS = {
    "include": [
        {"class": "bench", "count": 1, "color": "red"},
        {"class": "clock", "count": 1, "color": "blue"},
    ]
}
COLOUR_CLIP = "ViT-L-14-quickgelu"


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("kind", choices=["ocr", "composition"])
    parser.add_argument("--side", type=int, default=720, help="height and width of the pictures")
    parser.add_argument("--pictures", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    print(", ".join(f"{key} {value}" for key, value in result.items()))
    measuring.write_json(options.json, result)


def measure(options: Any, folder: Path) -> dict[str, Any]:
    pictures, words = signs(options.pictures, options.side)
    if options.kind == "ocr":
        scorer, device = make_scorer("ocr", {}, "cpu"), "cpu"
        prompts = [f'a sign that says "{word}"' for word in words]
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        scorer = make_scorer("composition", true_size(folder, device), device)
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
    generator = torch.Generator().manual_seed(0)
    coarse = 0.6 + 0.4 * torch.rand(count, 3, 9, 9, generator=generator)
    grounds = torch.nn.functional.interpolate(coarse, [side, side], mode="bicubic").clamp(0, 1)
    drawn, words = [], [WORDS[number % len(WORDS)] for number in range(count)]
    for ground, word in zip(
        (255 * grounds).to(torch.uint8).permute(0, 2, 3, 1), words, strict=True
    ):
        picture = Image.fromarray(ground.numpy())
        brush, face = ImageDraw.Draw(picture), ImageFont.load_default(side // 10)
        brush.text((side // 2, side // 2), word, font=face, fill=(20, 20, 60), anchor="mm")
        drawn.append(picture)
    return as_pictures(drawn), words


def true_size(folder: Path, device: str) -> dict[str, Any]:
    """Options of a scorer with owlv2-base-patch16-ensemble's and GenEval's CLIP's sizes."""
    torch.manual_seed(0)
    with torch.device(device):
        # As published, but for the vocabulary, which the tiny world's tokenizer has.
        config = Owlv2Config(
            text_config={"vocab_size": 567, "bos_token_id": 565, "eos_token_id": 566},
            vision_config={"image_size": 960},
        )
        detector = Owlv2ForObjectDetection(config)
        clip = open_clip.create_model(COLOUR_CLIP, load_weights=False, device=device)
    detector.save_pretrained(folder)
    CLIPTokenizer.from_pretrained(assets_dir() / "clip").save_pretrained(folder)
    Owlv2ImageProcessor(size={"height": 960, "width": 960}).save_pretrained(folder)
    torch.save(clip.state_dict(), folder / "clip.pt")
    return {
        "detector": str(folder),
        "clip": COLOUR_CLIP,
        "clip_checkpoint": str(folder / "clip.pt"),
        "dtype": "float16" if device == "cuda" else "float32",
    }


if __name__ == "__main__":
    main()
