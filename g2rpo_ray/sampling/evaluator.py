"""Evaluations of one prompt in batches, of fixed shapes where code is compiled."""

import torch
from torch import Tensor

from g2rpo_ray.models.batches import BatchSize, Warn
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.sampling.recorded import RecordedPass


class Evaluator:
    """One policy, asked for any number of velocities of one prompt, in batches that fit."""

    def __init__(
        self,
        policy: Policy,
        batch: BatchSize | int,
        *,
        fixed_shapes: bool = False,
        warn: Warn = lambda _: None,
    ) -> None:
        """
        Args:
            policy: on its device.
            batch: most evaluations in one pass of the network.
            fixed_shapes: fill a batch that is neither full nor of one latent, so that compiled code
                meets two shapes only; on a card, one latent's pass is recorded.
            warn: is told where that fails.
        """
        self.policy = policy
        self.evaluations = 0
        """Velocities that were asked for so far; what fills a batch does not count."""
        self._batch = BatchSize(batch, "rollout.batch_size") if isinstance(batch, int) else batch
        self.fixed_shapes = fixed_shapes
        recorded = policy.family.recordable and policy.transformer.device.type == "cuda"
        self._recorded = RecordedPass(policy, warn) if recorded else None
        self._records_all = False

    @property
    def batch_size(self) -> int:
        return self._batch.rows

    def record_all(self, shapes: int) -> None:
        """Record passes of whatever shape, and keep the last ``shapes`` of them; on a card, and of
        a family that can be recorded.

        It takes memory for each, and pays where a network is so small that the card waits for the
        host.
        """
        if self._recorded is not None:
            self._recorded.shapes, self._records_all = shapes, True

    def weights_changed(self) -> None:
        """To be called when the policy's weights are others than before."""
        if self._recorded is not None:
            self._recorded.weights_changed()

    @torch.no_grad()
    def __call__(self, x: Tensor, sigma: Tensor, embeds: Conditioning) -> Tensor:
        """Velocities, float32 ``[B, tokens, channels]``, of float32 latents at sigma ``[B]``.

        Raises:
            DeviceMemoryError: memory ended, also with half the batch.
        """
        self.evaluations += len(x)
        return self._batch.run(len(x), lambda rows: self._pass(x[rows], sigma[rows], embeds))

    def _pass(self, x: Tensor, sigma: Tensor, embeds: Conditioning) -> Tensor:
        rows, missing = len(x), self.batch_size - len(x)
        if not self.fixed_shapes or rows == 1 or missing == 0:
            wanted = self._records_all or (self.fixed_shapes and rows == 1)
            evaluate = self._recorded if wanted and self._recorded is not None else self.policy
            return evaluate(x, sigma, embeds)
        x = torch.cat([x, x[:1].expand(missing, -1, -1)])
        sigma = torch.cat([sigma, sigma[:1].expand(missing)])
        return self.policy(x, sigma, embeds)[:rows]
