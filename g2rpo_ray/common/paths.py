"""Where the paths of settings point."""

from pathlib import Path


def resolve_path(path: str) -> Path:
    """Path on disk of a setting; ``tiny_world:...`` points into this package."""
    if path.startswith("tiny_world:"):
        from g2rpo_ray.tiny_world import assets_dir

        return assets_dir() / path.removeprefix("tiny_world:")
    return Path(path).expanduser().absolute()


def is_shipped(path: Path) -> bool:
    """Whether it lies in this package, whose own tests say that it is whole."""
    return path.is_relative_to(resolve_path("tiny_world:"))
