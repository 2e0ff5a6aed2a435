"""The forward process and DiffusionNFT's loss on it (arXiv 2509.16117): no step is stochastic.

Two implicit policies lie around the old one that drew the pictures, ``v+- = (1 -+ beta) v_old +-
beta v``; a good picture's flow is to be the positive one's, a bad picture's the negative one's.
"""

from torch import Tensor


def noise_to(x0: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """``x_t = (1 - t) x_0 + t noise``; its flow's velocity is ``noise - x_0``.

    Args:
        x0: float32 ``[M, tokens, channels]``.
        noise: likewise.
        times: float32 ``[M]``, the noise levels, in (0, 1].
    """
    t = times[:, None, None]
    return (1 - t) * x0 + t * noise


def optimality(advantages: Tensor, clamp: float) -> Tensor:
    """``r = (1 + A / clamp) / 2`` in [0, 1]; advantages ``[M]`` in [-clamp, clamp]."""
    return (1 + advantages / clamp) / 2


def implicit_policies_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    target: Tensor,
    times: Tensor,
    good: Tensor,
    beta: float,
    *,
    adaptive: bool,
) -> Tensor:
    """``(r |v+ - target|^2 + (1 - r) |v- - target|^2) / beta``, elements' mean of each member.

    Its gradient where velocity and old velocity agree is ``2 (2 r - 1) (v_old - target)``, whatever
    beta. ``adaptive`` is the paper's weight: the error of the clean picture ``t (v+- - target)``,
    squared, by its own mean size without a gradient.

    Args:
        velocity: float32 ``[M, tokens, channels]``.
        old_velocity: likewise.
        target: likewise.
        times: float32 ``[M]``.
        good: float32 ``[M]``, r in [0, 1].

    Returns:
        ``[M]``.
    """
    shift = beta * (velocity - old_velocity)
    errors = [old_velocity + shift - target, old_velocity - shift - target]
    losses = [(error**2).mean(dim=(-2, -1)) for error in errors]
    if adaptive:
        # As published: t^2 |e|^2 / (t mean |e|), the denominator at least 1e-5.
        sizes = [times * error.detach().abs().mean(dim=(-2, -1)) for error in errors]
        losses = [
            times**2 * loss / size.clamp(min=1e-5) for loss, size in zip(losses, sizes, strict=True)
        ]
    return (good * losses[0] + (1 - good) * losses[1]) / beta
