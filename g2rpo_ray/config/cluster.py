"""The Ray cluster that a run uses."""

from pydantic import Field, field_validator

from g2rpo_ray.common.section import Section


class ClusterSection(Section):
    """The Ray cluster."""

    address: str | None = None
    """Ray address; none starts a private one on this machine unless RAY_ADDRESS is set."""
    dashboard: bool = True
    """Start the Ray dashboard with a private cluster; costs about a second and 150 MiB."""
    min_nodes: int = Field(1, ge=1)
    """Nodes that must be there before anything is placed; for launchers that start them one by
    one."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Longest wait for nodes, for placement, and for actors to load their models."""
    environment: list[str] = Field(
        default_factory=lambda: ["NCCL_*", "GLOO_*", "TORCH_NCCL_*", "HF_HOME"]
    )
    """Environment variables that workers get from the driver, ``*`` allowed. Never secrets: Ray
    shows them in its dashboard and logs."""

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            if not pattern.strip("*?[]"):
                raise ValueError(f"{pattern!r} would pass on everything; name the variables")
        return patterns
