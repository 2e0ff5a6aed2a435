"""Trains the two reward models: a CLIP, and an HPS-like model fine-tuned from it on preferences."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor

from tiny_world.autoencoder import decode, encode
from tiny_world.fitting import Fitted, Session, fit
from tiny_world.flux import TinyFlux, caption_tokens, finish, generate, load_flux
from tiny_world.pictures import PictureSource, blur, to_network, to_pictures
from tiny_world.support import half_precision
from tiny_world.world import World

CLIP_WEIGHTS = "open_clip_model.safetensors"
HPS_WEIGHTS = "HPS_tiny.pt"
SHARPNESS = 20.0  # preference odds are exp(SHARPNESS x difference of cosines)
FAMILY = 4  # captions of a training batch come as one and three near misses


@dataclass(frozen=True)
class RewardEffort:
    steps: int
    families: int
    flawed: int
    learning_rate: float
    generated: int = 0  # the weak model's pictures, at 6 and at 12 steps each


def load_clip(folder: Path, device: torch.device) -> open_clip.CLIP:
    return open_clip.create_model(f"local-dir:{folder.resolve()}").to(device).eval()


def load_hps(folder: Path, device: torch.device) -> open_clip.CLIP:
    """The architecture of the folder with the weights of its checkpoint."""
    model = open_clip.create_model(f"local-dir:{folder.resolve()}", load_weights=False)
    checkpoint = torch.load(folder / HPS_WEIGHTS, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["state_dict"])
    return model.to(device).eval()


def _half_state(model: open_clip.CLIP) -> dict[str, Tensor]:
    return {name: value.cpu().half().contiguous() for name, value in model.state_dict().items()}


class Reader:
    """Feeds a CLIP: pictures as its preprocessing would make them, captions as token ids."""

    def __init__(self, world: World, folder: Path, device: torch.device) -> None:
        tokenize = open_clip.get_tokenizer(f"local-dir:{folder.resolve()}")
        self.tokens = tokenize(world.captions).to(device)  # [C, 12]; longer in a larger world
        self.device, self.half = device, False
        self.mean = torch.tensor(open_clip.OPENAI_DATASET_MEAN, device=device)[:, None, None]
        self.std = torch.tensor(open_clip.OPENAI_DATASET_STD, device=device)[:, None, None]

    def image_features(self, model: open_clip.CLIP, values: Tensor) -> Tensor:
        """Unit features [B, 64] of pictures [B, 3, H, W] in [-1, 1]."""
        values = ((values + 1) / 2 - self.mean) / self.std
        with half_precision(self.device, self.half):
            features = model.encode_image(values)
        return F.normalize(features.float(), dim=-1)

    def text_features(self, model: open_clip.CLIP, captions: Tensor) -> Tensor:
        """Unit features [B, 64] of captions given by index."""
        return F.normalize(model.encode_text(self.tokens[captions.to(self.device)]), dim=-1)


@torch.no_grad()
def score(model: open_clip.CLIP, reader: Reader, pictures: Tensor, captions: Tensor) -> Tensor:
    """Cosine of picture and caption, float32 [B] on the CPU; pictures uint8 [B, H, W, 3]."""
    parts = []
    for rows in torch.arange(len(pictures)).split(1024):
        values = to_network(pictures[rows].to(reader.device))
        images = reader.image_features(model, values)
        parts.append((images * reader.text_features(model, captions[rows])).sum(dim=-1).cpu())
    return torch.cat(parts)


@dataclass(frozen=True)
class Painters:
    """The generators whose hand the reward models must know, read when they are asked."""

    folder: Path
    """Of FLUX, the good one."""
    weak_file: Path
    """Weights of a weaker one."""
    device: torch.device

    @cached_property
    def _loaded(self) -> tuple[TinyFlux, AutoencoderKL]:
        return load_flux(self.folder, self.device)

    @property
    def good(self) -> TinyFlux:
        return self._loaded[0]

    @property
    def vae(self) -> AutoencoderKL:
        return self._loaded[1]

    @cached_property
    def weak(self) -> TinyFlux:
        weak = TinyFlux(self.folder)
        weak.load_state_dict(torch.load(self.weak_file, weights_only=True))
        return weak.to(self.device).eval()


class TrainingPictures:
    """Right and flawed pictures in the condition in which a generator's pictures come.

    Of the right ones, a third passed through the VAE and a third through the good model's hand;
    of the flawed ones, two fifths were spoiled by the weak model. So neither the VAE's nor a
    model's traits say anything about the caption. Pictures are made once, `rounds` of every
    caption, because that takes longer than a training step; with one round, no painter is asked.
    """

    def __init__(self, world: World, painters: Painters, rounds: int, seed: int) -> None:
        self.source = PictureSource(painters.device, seed, world)
        self.painters = painters
        self.tokens = caption_tokens(painters.folder, world.captions, painters.device)
        self._right = self._bank(self._draw_right, rounds)
        self._flawed = self._bank(self._draw_flawed, rounds)

    def right(self, captions: Tensor) -> Tensor:
        """Right pictures, worn: [B, 3, H, W] in [-1, 1]."""
        return self.worn(self._pick(self._right, captions))

    def flawed(self, captions: Tensor) -> Tensor:
        """Pictures flawed in form or taken with a bad lens, worn: [B, 3, H, W] in [-1, 1]."""
        return self.worn(self._pick(self._flawed, captions))

    def worn(self, pictures: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] to the network's [B, 3, H, W], some softer, most noisier."""
        values = to_network(pictures)
        soft = (torch.rand(len(values), device=values.device) - 0.5).clamp(min=0) * 1.6
        noise = 0.06 * torch.rand_like(values[:, :1, :1, :1])
        return (blur(values, 1.0, soft) + noise * torch.randn_like(values)).clamp(-1, 1)

    @torch.no_grad()
    def _bank(self, draw: Callable[[Tensor, int], Tensor], rounds: int) -> Tensor:
        """uint8 [rounds, C, H, W, 3] on the device."""
        parts = torch.arange(len(self.source.world.codes)).split(960)
        return torch.stack(
            [torch.cat([draw(part, turn) for part in parts]) for turn in range(rounds)]
        )

    def _half(self) -> AbstractContextManager[None]:
        """For networks alone, not for what is drawn; on a CPU it would be slower than float32."""
        return half_precision(self.source.device, self.source.device.type == "cuda")

    def _pick(self, bank: Tensor, captions: Tensor) -> Tensor:
        turn = torch.randint(len(bank), captions.shape, generator=self.source.generator)
        return bank[turn.to(bank.device), captions.to(bank.device)]

    def _draw_right(self, captions: Tensor, turn: int) -> Tensor:
        pictures = self.source.draw(captions)
        if turn % 3 == 0:
            return pictures
        if turn % 3 == 1:
            return self._through_vae(pictures)
        return self._finished(self.painters.good, captions, pictures, 0.15, 0.45)

    def _draw_flawed(self, captions: Tensor, turn: int) -> Tensor:
        if turn % 5 == 0:
            return self.source.draw_flawed(captions)
        if turn % 5 == 1:
            return self._through_vae(self.source.draw_flawed(captions))
        pictures = self.source.draw(captions)
        if turn % 5 == 2:
            values = to_network(pictures)
            share = 0.6 + 0.4 * torch.rand(len(values), device=values.device)
            noise = 0.3 * torch.rand_like(values[:, :1, :1, :1])
            return to_pictures(blur(values, 2.5, share) + noise * torch.randn_like(values))
        return self._finished(self.painters.weak, captions, pictures, 0.7, 0.97)

    def _through_vae(self, pictures: Tensor) -> Tensor:
        with self._half():
            latents = encode(self.painters.vae, pictures)
            return decode(self.painters.vae, latents + 0.1 * torch.randn_like(latents))

    def _finished(
        self, model: TinyFlux, captions: Tensor, pictures: Tensor, least: float, most: float
    ) -> Tensor:
        sigma = least + (most - least) * torch.rand(len(pictures), device=pictures.device)
        tokens = self.tokens[captions.to(pictures.device)]
        with self._half():
            return finish(model, self.painters.vae, tokens, pictures, sigma)


def contrastive_loss(
    scale: Tensor, images: Tensor, flawed: Tensor, texts: Tensor, same: Tensor
) -> Tensor:
    """CLIP's symmetric loss; captions must also prefer their picture to every flawed one.

    Args:
        images, texts: unit features [N, 64], pairs.
        flawed: unit features [F, 64].
        same: bool [N, N], True where two captions mean the same scene and are not a pair.
    """
    targets = torch.arange(len(images), device=images.device)
    logits = (scale * images @ texts.T).masked_fill(same, float("-inf"))
    against_flaws = torch.cat((logits.T, scale * texts @ flawed.T), dim=1)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(against_flaws, targets)) / 2


def _same_scene(source: PictureSource, captions: Tensor, device: torch.device) -> Tensor:
    scene = source.world.scenes[captions]
    same = scene[:, None] == scene
    return same.fill_diagonal_(False).to(device)


def _fit(
    model: open_clip.CLIP,
    effort: RewardEffort,
    name: str,
    batch_loss: Callable[[bool], Tensor],
    source: PictureSource,
    session: Session,
) -> None:
    """AdamW with a one-cycle rate over `batch_loss()`, whose captions come from the source."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=effort.learning_rate,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, effort.learning_rate, total_steps=effort.steps, pct_start=0.1
    )

    def at_most_100(_step: int) -> None:
        with torch.no_grad():
            model.logit_scale.clamp_(max=4.6)  # the logarithm of CLIP's own limit

    of = Fitted(name, model, optimizer, schedule, batch_loss, at_most_100, [source.generator])
    fit(of, effort.steps, session)


def train_clip(
    folder: Path, pictures: TrainingPictures, effort: RewardEffort, session: Session
) -> None:
    """Train the `local-dir:` folder's architecture from nothing on pictures and captions.

    `hf_tokenizer_name` makes open_clip read the tokenizer from the folder itself; its own
    vocabulary path (`bpe_path`) would depend on the current directory.
    """
    torch.manual_seed(session.seed)
    device = session.device
    model = open_clip.create_model(f"local-dir:{folder.resolve()}", load_weights=False)
    model = model.to(device).train()
    reader = Reader(pictures.source.world, folder, device)

    def batch_loss(half: bool) -> Tensor:
        reader.half = half
        captions = pictures.source.families(effort.families, FAMILY)
        images = pictures.right(captions.flatten())
        flaws = pictures.flawed(captions.flatten()[: effort.flawed])
        features = reader.image_features(model, torch.cat((images, flaws)))
        return contrastive_loss(
            model.logit_scale.exp(),
            features[: captions.numel()],
            features[captions.numel() :],
            reader.text_features(model, captions.flatten()),
            _same_scene(pictures.source, captions.flatten(), device),
        )

    _fit(model, effort, folder.name, batch_loss, pictures.source, session)
    save_file(_half_state(model), folder / CLIP_WEIGHTS)


def train_hps(
    folder: Path,
    clip_folder: Path,
    pictures: TrainingPictures,
    effort: RewardEffort,
    session: Session,
) -> None:
    """Fine-tune the CLIP on preferences and write the checkpoint with its architecture.

    The winner is a right picture. The losers are a right picture of a near-miss caption, a flawed
    picture, and one by the weak model: nobody asks the oracle.
    """
    torch.manual_seed(session.seed)
    device = session.device
    model = load_clip(clip_folder, device).train()
    reader = Reader(pictures.source.world, folder, device)
    drawn, drawn_captions = _generated(pictures, effort.generated, session.seed)

    def batch_loss(half: bool) -> Tensor:
        reader.half = half
        captions = pictures.source.families(effort.families, FAMILY)
        chosen = torch.randint(len(drawn), (effort.flawed,), generator=pictures.source.generator)
        beside = drawn_captions[chosen]
        count, flawed = captions.numel(), effort.flawed
        asked = torch.cat((captions.flatten(), captions.flatten()[:flawed], beside, beside))
        images = torch.cat(
            (
                pictures.right(captions.flatten()),
                pictures.flawed(captions.flatten()[:flawed]),
                pictures.right(beside),
                pictures.worn(drawn[chosen.to(device)]),
            )
        )
        features = reader.image_features(model, images)
        texts = reader.text_features(model, asked)
        scores = (features * texts).sum(dim=-1)
        own, spoiled, right, generated = scores.split((count, flawed, flawed, flawed))
        # In a family, each picture also loses under the next member's caption. Two members may
        # have come to the same caption by the same change.
        by_family = texts[:count].unflatten(0, captions.shape).roll(1, dims=1).flatten(0, 1)
        differs = (captions != captions.roll(1, dims=1)).flatten().to(device)
        near_miss = (features[:count] * by_family).sum(dim=-1)[differs]
        winners = torch.cat((own, right))
        losers = torch.cat((near_miss, spoiled, generated))
        same_caption = F.softplus(SHARPNESS * (generated - right)).mean()
        any_caption = F.softplus(SHARPNESS * (losers - winners[:, None])).mean()
        anchor = contrastive_loss(
            model.logit_scale.exp(),
            features[:count],
            features[count : count + flawed],
            texts[:count],
            _same_scene(pictures.source, captions.flatten(), device),
        )
        return any_caption + same_caption + 0.3 * anchor

    _fit(model, effort, "hps", batch_loss, pictures.source, session)
    torch.save({"state_dict": _half_state(model)}, folder / HPS_WEIGHTS)


def _generated(pictures: TrainingPictures, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """`count` pictures of the weak model at 6 and at 12 steps each, and their caption indices."""
    drawn, asked = [], []
    for steps in (6, 12):
        captions = pictures.source.captions(count)
        device = pictures.tokens.device
        tokens, painters = pictures.tokens[captions.to(device)], pictures.painters
        drawn.append(generate(painters.weak, painters.vae, tokens, steps, seed + steps).to(device))
        asked.append(captions)
    return torch.cat(drawn), torch.cat(asked)
