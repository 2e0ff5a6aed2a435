"""How branches are finished, and how their ranking is judged."""

from types import ModuleType

import numpy as np
import pytest
import torch

import measuring
from comparing import ranking
from g2rpo_ray.config import Config
from g2rpo_ray.sampling.engine import RolloutEngine
from g2rpo_ray.sampling.group import GroupKey
from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("granularity_bias")


@pytest.fixture(scope="module")
def config() -> Config:
    return measuring.run_config(["sampling.members=3"], ["hps", "clip"])


def test_walks_end_where_the_rollouts_completions_do(script: ModuleType, config: Config) -> None:
    engine = RolloutEngine(config, torch.device("cpu"))
    sampler, shape = engine.sampler(6), engine.policy.shape.packed
    embeds = engine.policy.blank(10, torch.float32, "cpu")
    branches = GroupKey(0, 1).branch_noise(shape, 2, 3)
    grids = [
        [float(sampler.sigmas[i]) for i in script.completion_indices(6, 2, g)[:-1]]
        for g in (1, 2, 3)
        for _ in range(3)
    ]
    mine = script.walk(sampler, branches.repeat(3, 1, 1), grids, embeds)
    [(_, theirs)] = sampler.completions(branches[None], [2], [1, 2, 3], embeds)
    torch.testing.assert_close(mine.view(3, 3, *shape), theirs, rtol=1e-4, atol=1e-4)


def test_correlation_is_inside_groups_and_leaves_constant_ones_out() -> None:
    a = np.array([[[1.0, 2, 3], [1, 1, 1]], [[3, 2, 1], [0, 1, 0]]])
    found = ranking.correlation(a, np.array([[[10.0, 20, 30], [1, 2, 3]], [[1, 2, 3], [5, 7, 5]]]))
    wanted = np.array([[1, np.nan], [-1, 1]])
    assert np.allclose(found, wanted, equal_nan=True)
    mean, low, high = ranking.with_interval(found)
    assert mean == pytest.approx(1 / 3)
    assert low <= 0 < mean <= high <= 1
    assert np.isnan(ranking.with_interval(np.full((2, 1), np.nan))).all()


def test_each_lambda_is_ranked_against_what_branches_are_worth(config: Config) -> None:
    ways, generator = ranking.all_ways(), np.random.default_rng(0)
    worth = generator.normal(size=(4, 2, 3, 3))  # prompts, rewards, K, members
    scores = np.zeros((4, 2, len(ways), 3, 3), np.float32)
    for number, way in enumerate(ways):
        off = {1: 0.0, 2: 1.0, 3: 3.0}[way.number] if way.kind == "grid" else 0.0
        sign = -1 if way.kind == "behind" else 1
        scores[:, :, number] = sign * (worth + off * generator.normal(size=worth.shape))
    whole = config.model_copy(
        update={"rewards": {**config.rewards, "oracle": config.rewards["clip"]}}
    )
    scores = np.concatenate([scores, scores[:, :1]], axis=1)
    found = ranking.Correlations(scores, ["clip", "hps", "oracle"], whole)
    found.values["trained"] = found.values["trained"][:, :2]
    rows = {row["row"]: row for row in ranking.rows_of(found)}
    one, two, three = (np.nanmean(rows[f"Λ={{{n}}}"]["fine trained"]) for n in (1, 2, 3))
    assert one == pytest.approx(1)
    assert one > two > three
    assert np.nanmean(rows["Λ={1}"]["push trained"]) == pytest.approx(1)
    assert rows["Λ={1}"]["evaluations"] < rows["Λ={1,2}"]["evaluations"]
    assert len("\n".join(ranking.markdown(list(rows.values()))).splitlines()) > 10
