"""Secrets that the run needs, and who may reach the cluster."""

import importlib.util
import netrc
import os
from pathlib import Path

from ray._private.authentication.authentication_utils import is_token_auth_enabled

from g2rpo_ray.config import Config
from g2rpo_ray.doctor.findings import Finding, fail, ok, warn

WITHOUT_KEY = ("offline", "dryrun", "disabled")
"""Values of WANDB_MODE, in which W&B asks no server."""


def check_secrets(config: Config | None) -> list[Finding]:
    """Only whether they are there; never their values."""
    if config is None or config.tracking.wandb_project is None:
        return []
    findings = []
    if importlib.util.find_spec("wandb") is None:
        remedy = "pip install 'g2rpo-ray[wandb]', or tracking.wandb_project=null"
        findings.append(fail("secrets", "the package wandb is not installed", remedy))
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode in WITHOUT_KEY:
        return [*findings, ok("secrets", f"WANDB_MODE is {mode}: no key is needed")]
    if os.environ.get("WANDB_API_KEY") or _wandb_in_netrc():
        return [*findings, ok("secrets", "WANDB_API_KEY is set")]
    project = config.tracking.wandb_project
    what = f"tracking.wandb_project is {project!r} and there is no WANDB_API_KEY"
    remedy = (
        "set it in the driver's environment from a secret (docs/security.md), or "
        "WANDB_MODE=offline, which writes into the run's folder, or tracking.wandb_project=null"
    )
    return [*findings, fail("secrets", what, remedy)]


def check_authentication(private: bool) -> Finding:
    """Who reaches Ray's ports can run code, unless Ray asks for a token."""
    if is_token_auth_enabled():
        return ok("authentication", "Ray asks every connection for its token")
    if private:
        return ok("authentication", "off; this Ray is private and ends with the command")
    return warn(
        "authentication",
        "off: whoever reaches Ray's ports can run code as you",
        "RAY_AUTH_MODE=token with RAY_AUTH_TOKEN_PATH on every node, driver and client "
        "(docs/security.md), or a closed network",
    )


def _wandb_in_netrc() -> bool:
    try:
        return "api.wandb.ai" in netrc.netrc(Path("~/.netrc").expanduser()).hosts
    except (OSError, netrc.NetrcParseError):
        return False
