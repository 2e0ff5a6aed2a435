"""Shared by all tests: small paths and nothing else."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return Path(__file__).parent / "golden"
