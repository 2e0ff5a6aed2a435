"""Where the paths of settings point."""

from pathlib import Path


def resolve_path(path: str) -> Path:
    """Path on disk of a setting; ``tiny_world:...`` points into this package."""
    if path.startswith("tiny_world:"):
        from g2rpo_ray.tiny_world import assets_dir

        return assets_dir() / path.removeprefix("tiny_world:")
    return Path(path).expanduser().absolute()
