"""One stochastic step from sigma to sigma_next: mean, std, sample and log-probability.

Three kinds of step turn the ODE sampler into a policy with a Gaussian action:

- ``flow``  Flow-GRPO and G2RPO (arXiv 2505.05470, eq. 9)
- ``dance`` DanceGRPO (arXiv 2505.07818, eq. 7), constant noise level
- ``cps``   coefficients-preserving sampling (arXiv 2509.05952), no excess noise in the result

Whatever the network computes in, latents, moments and log-probabilities here are float32 or wider.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo_ray.maths.choices import LogProbForm, SdeKind

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class SdeStep:
    """The stochastic step k of a schedule; plain numbers, so it is cheap to make and to send."""

    kind: SdeKind
    """Which transition: ``flow``, ``dance`` or ``cps``."""
    eta: float
    """Noise level: 0 is the ODE; the papers use 0.7 (flow), 0.3 (dance), 0.8 (cps)."""
    sigma: float
    """sigma[k], where the velocity was predicted; in (0, 1]."""
    sigma_next: float
    """sigma[k + span]; in (0, sigma)."""
    beside_noise: float | None = None
    """sigma[1], of a step that spans several from sigma 1; else none."""

    @classmethod
    def at(cls, sigmas: Tensor, index: int, kind: SdeKind, eta: float, span: int = 1) -> "SdeStep":
        """The step from ``sigmas[index]`` to ``sigmas[index + span]``.

        Raises:
            ValueError: a step that it spans is not one of 0 .. T - 2. The last step ends at sigma
                0, where noise would stay in the picture.
        """
        last = len(sigmas) - 3
        if not 0 <= index <= index + span - 1 <= last:
            raise ValueError(
                f"SDE step {index if span == 1 else f'{index} to {index + span - 1}'} is out of "
                f"range; with {len(sigmas) - 1} steps the allowed ones are 0 to {last} (the last "
                "step must be deterministic)"
            )
        beside_noise = float(sigmas[1]) if index == 0 and span > 1 else None
        return cls(kind, eta, float(sigmas[index]), float(sigmas[index + span]), beside_noise)

    @property
    def dt(self) -> float:
        """sigma - sigma_next, positive."""
        return self.sigma - self.sigma_next

    @property
    def std(self) -> float:
        """Standard deviation of the noise that this step adds to every latent element."""
        if self.kind == "flow":
            return self._flow_diffusion * math.sqrt(self.dt)
        if self.kind == "dance":
            return self.eta * math.sqrt(self.dt)
        return self.sigma_next * math.sin(self.eta * math.pi / 2)

    @property
    def _flow_diffusion(self) -> float:
        # eta * sqrt(sigma / (1 - sigma)) has a pole at sigma 1; there sigma[1] stands in.
        stand_in = self.sigma_next if self.beside_noise is None else self.beside_noise
        distance_to_noise = 1 - (self.sigma if self.sigma < 1 else stand_in)
        return self.eta * math.sqrt(self.sigma / distance_to_noise)

    @property
    def mean_coefficients(self) -> tuple[float, float]:
        """(a, b) with ``mean = a * x + b * v``: every kind is linear in latents and velocity."""
        sigma, dt = self.sigma, self.dt
        if self.kind == "flow":
            drift = self._flow_diffusion**2 / (2 * sigma)
            return 1 - drift * dt, -(1 + drift * (1 - sigma)) * dt
        if self.kind == "dance":
            # Score -(x - (1 - sigma) * x_0) / sigma^2 with x_0 = x - sigma * v.
            score_of_x = -1 / sigma
            score_of_v = -(1 - sigma) / sigma
            half = 0.5 * self.eta**2 * dt
            return 1 + half * score_of_x, -dt + half * score_of_v
        # mean = (1 - s') * x_0 + s' * cos(eta * pi / 2) * noise, noise = x + (1 - sigma) * v.
        keep = self.sigma_next * math.cos(self.eta * math.pi / 2)
        clean = 1 - self.sigma_next
        return clean + keep, keep * (1 - sigma) - clean * sigma

    def mean(self, x: Tensor, v: Tensor) -> Tensor:
        """Mean of the next latents; ``x`` and ``v`` of the same shape, float32 or wider."""
        _require_wide(x, v)
        of_x, of_v = self.mean_coefficients
        return of_x * x + of_v * v

    def sample(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Next latents ``mean + std * noise``; ``noise`` broadcasts against ``mean``."""
        return mean + self.std * noise

    def log_prob(self, next_x: Tensor, mean: Tensor, form: LogProbForm = "gaussian") -> Tensor:
        """Log-probability of ``next_x``, averaged over all elements of a sample.

        ``gaussian`` is the full density. ``squared_error`` is ``-(next_x - mean)^2`` without the
        variance, as public CPS code has it: the ratio then has another scale, so a clip range
        that suits one form does not suit the other.

        Args:
            next_x: ``[..., tokens, channels]``, float32 or wider.
            mean: the same, broadcast against it.

        Returns:
            ``[...]``: the mean over tokens and channels.
        """
        _require_wide(next_x, mean)
        squared = (next_x - mean) ** 2
        if form == "squared_error":
            return -squared.mean(dim=(-2, -1))
        gaussian = -squared / (2 * self.std**2) - math.log(self.std) - LOG_SQRT_2PI
        return gaussian.mean(dim=(-2, -1))


def euler_step(x: Tensor, v: Tensor, sigma: float | Tensor, sigma_next: float | Tensor) -> Tensor:
    """Deterministic step ``x + (sigma_next - sigma) * v``; sigmas are numbers or ``[B, 1, 1]``."""
    return x + (sigma_next - sigma) * v


def predict_x0(x: Tensor, v: Tensor, sigma: float | Tensor) -> Tensor:
    """The clean latents that one evaluation promises: ``x - sigma * v``."""
    return x - sigma * v


def _require_wide(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"SDE moments need float32 or float64, not {tensor.dtype}: narrower latents move "
                "the log-probability by more than the clip range"
            )
