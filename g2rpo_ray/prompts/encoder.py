"""Who encodes prompts: a run's one actor, and the Ray Data workers of ``g2rpo embed``."""

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import count
from pathlib import Path
from queue import PriorityQueue
from typing import Any

import torch
from safetensors.torch import save

from g2rpo_ray.common.device import role_device
from g2rpo_ray.common.files import replacing
from g2rpo_ray.config import Config
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import negative_prompt
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts.dataset import EmbeddedPrompts, Prompt
from g2rpo_ray.prompts.embeddings import NEGATIVE_FILE, prompt_checksum, stacked
from g2rpo_ray.prompts.kept import KeptEmbeddings

SHARD_FILE = "shard_{:05d}.safetensors"
CACHED_PROMPTS = 256
"""Of those to train on, whose order is another in every epoch; held-out ones are on the disk."""


class PromptEncoder:
    """Holds the text encoders, so that no other role needs their memory. Embeddings that lie on the
    disk already are read."""

    def __init__(self, config: Config, kept: Sequence[Path]) -> None:
        """``kept`` are folders of ``KeptEmbeddings``, for held-out prompts."""
        torch.set_num_threads(config.encoder_threads)
        self._config, self._negative = config, negative_prompt(config)
        self._embedded = EmbeddedPrompts(config)
        self._kept = KeptEmbeddings(kept, config)
        self._encode = lru_cache(CACHED_PROMPTS)(self._embeds)

    def encode(self, prompt_id: int, text: str) -> Prompt:
        """A prompt to train on."""
        return Prompt(prompt_id, text, self._encode(text))

    def encode_heldout(self, prompt_id: int, text: str) -> Prompt:
        """A prompt to judge by: every evaluation asks for it, so it is encoded once a run."""
        embeds = self._embedded.get(text)
        if embeds is None:
            negative = None if self._negative is None else self._kept_or_made(self._negative)
            embeds = replace(self._kept_or_made(text), negative=negative)
        return Prompt(prompt_id, text, embeds)

    def cut(self, texts: Sequence[str]) -> list[int]:
        """``TextEncoder.cut`` of the texts that it will encode."""
        new = [t for t in texts if t not in self._embedded and not self._kept.has(t)]
        return self._encoder.cut(new) if new else []

    def prepare(self) -> None:
        """Load the text encoders, unless prompts to train on were embedded."""
        if not self._embedded.train:
            _ = self._encoder

    def _embeds(self, text: str) -> Conditioning:
        return self._embedded.get(text) or self._encoder.encode(text)

    def _kept_or_made(self, text: str) -> Conditioning:
        embeds = self._kept.get(text)
        if embeds is None:
            embeds = replace(self._encoder.encode(text), negative=None)
            self._kept.keep(text, embeds)
        return embeds

    @cached_property
    def _encoder(self) -> TextEncoder:
        """Loaded when a prompt first needs it: never, if all of them were embedded before."""
        prompts = self._config.prompts
        device = role_device(prompts.encoder_gpus, "prompts.encoder_gpus")
        length = prompts.max_sequence_length
        return TextEncoder(self._config.model, length, device.type, self._negative)


class EncoderActor:
    """A run's encoder as an asynchronous Ray actor: of all that is asked for, what is trained on
    goes first, in its order; held-out prompts get the time that is left."""

    def __init__(self, config: Config, kept: Sequence[Path]) -> None:
        self._encoder = PromptEncoder(config, kept)
        self._asked: PriorityQueue[tuple[float, int, Callable[[], Any], Future[Any]]]
        self._asked, self._numbers = PriorityQueue(), count()
        # Threads of PyTorch are a setting of each thread that computes.
        self._threads = config.encoder_threads
        threading.Thread(target=self._serve, daemon=True).start()

    async def prepare(self) -> None:
        """Before a run trains: what its prompts need is loaded while the other roles start."""
        await self._answer(-math.inf, self._encoder.prepare)

    async def cut(self, texts: Sequence[str]) -> list[int]:
        """As of ``PromptEncoder``."""
        sizes: list[int] = await self._answer(-math.inf, partial(self._encoder.cut, texts))
        return sizes

    async def encode(self, prompt_id: int, text: str, place: float) -> Prompt:
        """
        Args:
            place: what waits with a lower one goes first; Ray brings requests in any order.
        """
        work = partial(self._encoder.encode, prompt_id, text)
        prompt: Prompt = await self._answer(place, work)
        return prompt

    async def encode_heldout(self, prompt_id: int, text: str) -> Prompt:
        """After all that is trained on."""
        work = partial(self._encoder.encode_heldout, prompt_id, text)
        prompt: Prompt = await self._answer(math.inf, work)
        return prompt

    async def _answer(self, place: float, work: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()
        self._asked.put((place, next(self._numbers), work, answer))
        return await asyncio.wrap_future(answer)

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            _, _, work, answer = self._asked.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(work())
            except BaseException as error:  # noqa: BLE001  (raised again where it is waited for)
                answer.set_exception(error)


class ShardEncoder:
    """Holds the text encoders; a call encodes and writes one shard. Ray Data makes actors of it."""

    def __init__(self, config: Config, folder: Path, gpus: float) -> None:
        torch.set_num_threads(config.encoder_threads)
        device = role_device(gpus, "--gpus-per-worker").type
        length, negative = config.prompts.max_sequence_length, negative_prompt(config)
        self._encoder = TextEncoder(config.model, length, device, negative)
        self._folder = folder

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """``{shard, texts}`` -> ``{shard, file, prompts, bytes, sha256, checksums, cut, seconds}``.

        Prompts are encoded one at a time, so the numbers are those that training on the fly gets.
        """
        started_s = time.perf_counter()
        negative = self._encoder.negative
        if negative is not None:
            _write(self._folder / NEGATIVE_FILE, save(dict(negative.tensors)))
        texts = [str(text) for text in row["texts"]]
        embeds = [self._encoder.encode(text) for text in texts]
        path = self._folder / SHARD_FILE.format(row["shard"])
        content = save(stacked(embeds))
        _write(path, content)
        return {
            "shard": row["shard"],
            "file": path.name,
            "prompts": len(embeds),
            "cut": self._encoder.cut(texts),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "checksums": [prompt_checksum(e) for e in embeds],
            "negative_checksum": negative and prompt_checksum(negative),
            "seconds": time.perf_counter() - started_s,
        }


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
