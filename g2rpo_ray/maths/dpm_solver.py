"""One deterministic step of second order, for the compressed end of MixGRPO-Flash's trajectory."""

import math

from torch import Tensor


def dpm_solver_step(
    x: Tensor, x0: Tensor, sigma: float, sigma_next: float, previous: tuple[Tensor, float] | None
) -> Tensor:
    """DPM-Solver++(2M), multistep with data prediction (arXiv 2211.01095, algorithm 2).

    With alpha = 1 - sigma, log-SNR ``l = log(alpha / sigma)``, ``h = l_next - l`` and ``r`` the
    last step's h by this one's: ``x_next = sigma_next / sigma * x - alpha_next * (e^-h - 1) * D``,
    ``D = (1 + 1 / (2 r)) * x0 - 1 / (2 r) * x0_previous``.

    Args:
        x: latents at ``sigma``; ``x0``: the clean latents that their evaluation promises.
        sigma: below 1; ``sigma_next``: below ``sigma``.
        previous: x0 and sigma of the evaluation before; none for the first step, which is Euler's
            then. So is a step to sigma 0, where the log-SNR is infinite.
    """
    promised = x0
    if previous is not None and sigma_next > 0:
        x0_previous, sigma_previous = previous
        step = _log_snr(sigma_next) - _log_snr(sigma)
        half_share = step / (2 * (_log_snr(sigma) - _log_snr(sigma_previous)))
        promised = x0 + half_share * (x0 - x0_previous)
    # alpha_next * (1 - e^-h), written so that sigma_next may be 0.
    return sigma_next / sigma * x + (1 - sigma_next / sigma) * promised


def _log_snr(sigma: float) -> float:
    return math.log((1 - sigma) / sigma)
