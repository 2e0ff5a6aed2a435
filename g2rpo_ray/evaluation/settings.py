"""The settings that an evaluation's own roles run with."""

from g2rpo_ray.config import Config


def at_deployment_size(config: Config) -> Config:
    """``config`` with ``evaluation.height`` and ``width`` in place of the training's size."""
    evaluation, sampling = config.evaluation, config.sampling
    size = {
        "height": evaluation.height or sampling.height,
        "width": evaluation.width or sampling.width,
    }
    return config.model_copy(update={"sampling": sampling.model_copy(update=size)})
