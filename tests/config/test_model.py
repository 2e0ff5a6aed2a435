"""``model``: which weights can be shared, and which are kept in 8 bits."""

import pytest

from tests.config.quick import error_of, quickstart


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "share_frozen is true and lora is not set: weights that are trained"),
        (
            ("model.lora.rank=2", "learner.zero_stage=3"),
            "model.share_frozen is true and learner.zero_stage is 3, which splits",
        ),
    ],
)
def test_weights_that_are_trained_or_split_are_not_shared(
    overrides: tuple[str, ...], said: str
) -> None:
    assert said in error_of("model.share_frozen=true", *overrides)
    assert not quickstart(*overrides).shares_frozen


@pytest.mark.parametrize(
    ("shares", "worker", "rank", "workers", "stage"),
    [
        (True, 0.42, 0.44, 1, 2),
        (True, 0.5, 1, 2, 1),
        (False, 0.5, 1, 1, 2),
        (False, 0.9, 1, 4, 2),
        (False, 0.42, 0.44, 2, 3),
        # CPU roles only where they are told to.
        (False, 0, 0, 2, 2),
    ],
)
def test_adapters_share_a_card_where_two_roles_fit_on_it(
    shares: bool, worker: float, rank: float, workers: int, stage: int
) -> None:
    settings = (
        f"rollout.gpus_per_worker={worker}",
        f"learner.gpus_per_rank={rank}",
        f"rollout.workers={workers}",
        f"learner.zero_stage={stage}",
        "learner.ranks=1",
    )
    assert quickstart("model.lora.rank=2", *settings).shares_frozen is shares
    assert not quickstart("model.lora.rank=2", "model.share_frozen=false", *settings).shares_frozen
    assert not quickstart(*settings).shares_frozen


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "model: frozen_dtype is float8 and lora is not set: weights that are trained"),
        (
            ("model.trained_modules=[attn.to_q]",),
            "model: frozen_dtype is float8 and lora is not set: weights that are trained",
        ),
        (
            ("model.lora.rank=2", "learner.zero_stage=3"),
            "model.frozen_dtype is float8 and learner.zero_stage is 3, which splits weights",
        ),
    ],
)
def test_weights_that_are_trained_or_split_are_not_kept_in_8_bits(
    overrides: tuple[str, ...], said: str
) -> None:
    assert said in error_of("model.frozen_dtype=float8", *overrides)
    assert quickstart("model.lora.rank=2", "model.frozen_dtype=float8").model.lora is not None
