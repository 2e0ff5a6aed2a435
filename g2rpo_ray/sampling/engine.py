"""RolloutEngine: the networks of a rollout worker, ready on their device."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from g2rpo_ray.config import Config
from g2rpo_ray.config.rollout import AUTO_BATCH_SIZES
from g2rpo_ray.config.sampling import SamplingSection
from g2rpo_ray.maths.schedule import static_shift_schedule
from g2rpo_ray.models.attention import choose_attention
from g2rpo_ray.models.batches import BatchSize, largest_batch, name_memory
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.fp8 import Float8Twin, check_float8
from g2rpo_ray.models.kernels import (
    compile_blocks,
    compile_decoder,
    compile_errors,
    undo_compilation,
)
from g2rpo_ray.models.loading import DTYPES, load_part
from g2rpo_ray.models.policy import Load, Policy, load_policy
from g2rpo_ray.models.vae import PictureDecoder
from g2rpo_ray.sampling.evaluator import Evaluator
from g2rpo_ray.sampling.sampler import Sampler

ROOM = (
    "rollout.gpus_per_worker gives it more of the card; model.frozen_dtype=float8 and "
    "rollout.fp8=false need less, and so do fewer roles on one card"
)
"""What to change where a worker's memory ends."""


def schedule_of(sampling: SamplingSection, steps: int, policy: Policy) -> Tensor:
    """The configured schedule ``[steps + 1]``, computed in float32 as diffusers does."""
    if sampling.schedule == "dynamic":
        return policy.family.schedule(steps, policy.shape)
    return static_shift_schedule(steps, sampling.shift, torch.float32)


class RolloutEngine:
    """Loads, compiles and warms up once; then gives samplers and decodes."""

    def __init__(self, config: Config, device: torch.device, load: Load = load_part) -> None:
        """
        Args:
            load: gives the networks.

        Raises:
            ModelFolderError: the model cannot be loaded.
            AttentionBackendError: ``rollout.attention`` is unknown, not installed, or not for this
                card or network.
            CompileCacheError: ``rollout.compile_cache`` cannot be written.
            Float8Error: ``rollout.fp8`` on a card without such products.
            DeviceMemoryError: the device's memory does not suffice.
        """
        started_s = time.perf_counter()
        self.config, self.device = config, device
        self.warnings: list[str] = []
        """What happened since somebody emptied this list."""
        settings, on_gpu = config.rollout, device.type == "cuda"
        compiled = on_gpu if settings.compile is None else settings.compile
        self._dtype = DTYPES[config.model.dtype]
        if settings.fp8:
            check_float8(device, settings.asked("fp8"))
        with name_memory("a rollout worker's networks", ROOM):
            self.policy = load_policy(config, device, load=load)
            # A compiled decoder has its weights in another order, and so for itself.
            vae = (load_part if compiled else load)(config.model, "vae", self._dtype, device)
            if attention := settings.attention or ("cudnn" if on_gpu else None):
                choose_attention(self.policy.transformer, attention)
            self._twin = Float8Twin(self.policy) if settings.fp8 else None
        self._policies = [self.policy] if self._twin is None else [self.policy, self._twin.policy]
        warn, longer_side = self.warnings.append, max(config.sampling.height, config.sampling.width)
        self.decoder = PictureDecoder(
            self.policy.family,
            vae,
            self.policy.shape,
            BatchSize(settings.decode_batch_size, "rollout.decode_batch_size", warn),
            tiled=longer_side > settings.decode_tile_above_px,
            fixed_shapes=compiled,
        )
        self._batch = BatchSize(settings.planned_batch_size, "rollout.batch_size", warn)
        evaluators = [
            Evaluator(p, self._batch, fixed_shapes=compiled, warn=warn) for p in self._policies
        ]
        self._evaluators, self.exact, self.estimate = evaluators, evaluators[0], evaluators[-1]
        # Only now is everything on the device that a batch has to fit beside.
        if compiled:
            compiled = self._compile()
        else:
            self._choose_batch()
        self.description = (
            f"batches of {self._batch.rows}, attention {attention or 'as PyTorch chooses'}, "
            f"{'compiled' if compiled else 'not compiled'}, {settings.speed_in_words}, ready after "
            f"{time.perf_counter() - started_s:.0f} s"
        )

    @property
    def evaluations(self) -> int:
        """Velocities computed so far, by whichever policy."""
        return sum(evaluate.evaluations for evaluate in self._evaluators)

    @property
    def batch_size(self) -> int:
        """Most evaluations in one pass, as it is now."""
        return self.exact.batch_size

    def sampler(self, steps: int) -> Sampler:
        """A sampler on the configured schedule of ``steps``."""
        sigmas = schedule_of(self.config.sampling, steps, self.policy)
        return Sampler(self.exact, sigmas, self.estimate, self.config.rollout.fp8_above_sigma)

    def weights_changed(self) -> None:
        """To be called when the policy's weights are others than before."""
        if self._twin is not None:
            self._twin.refresh()
        for evaluate in self._evaluators:
            evaluate.weights_changed()

    def _choose_batch(self) -> None:
        """Where it is ``auto``, by the code that the run will compute with."""
        if self.config.rollout.batch_size == "auto" and self.device.type == "cuda":
            self._batch.rows = largest_batch(
                AUTO_BATCH_SIZES,
                lambda rows: [self._evaluate(policy, rows) for policy in self._policies],
                "rollout.batch_size",
            )

    def _compile(self) -> bool:
        """Compile and meet every shape once; whether it worked."""
        for policy in self._policies:
            compile_blocks(policy, self.config.rollout.compile_cache, trained=False)
        compile_decoder(self.decoder.vae.decoder)
        try:
            self._meet_all_shapes()
        except compile_errors() as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            self.warnings.append(
                f"torch.compile failed and the rollout goes on without it, slower ({reason}); "
                "rollout.compile=false silences this"
            )
            for network in (*self._policies, self.decoder.vae.decoder):
                undo_compilation(network)
            # Nothing is filled up for shapes that no code has, or recorded.
            for evaluate in self._evaluators:
                evaluate.fixed_shapes = False
            self.decoder.fixed_shapes = False
            self._meet_all_shapes()
            return False
        return True

    def _meet_all_shapes(self) -> None:
        self._choose_batch()
        self._evaluate(self.exact, 1)
        met = 0
        while met != self.batch_size:
            # Again where the batch was halved meanwhile: both are to meet its new shape.
            met = self.batch_size
            for evaluate in self._evaluators:
                self._evaluate(evaluate, met)
        self.decoder.decode(torch.zeros(1, *self.policy.shape.packed, device=self.device))

    @torch.no_grad()
    def _evaluate(
        self, evaluate: Callable[[Tensor, Tensor, Conditioning], Tensor], rows: int
    ) -> Tensor:
        policy, device = self.policy, self.policy.transformer.device
        embeds = policy.blank(self.config.prompts.max_sequence_length, self._dtype, device)
        latents = torch.zeros(rows, *policy.shape.packed, device=device)
        return evaluate(latents, torch.full((rows,), 0.5, device=device), embeds)
