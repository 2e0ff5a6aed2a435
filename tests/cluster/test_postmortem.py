"""What is said of an actor that died."""

from pathlib import Path

import pytest
import ray

from g2rpo_ray.cluster.postmortem import first_line, own_place


class Refusing:
    """Cannot be made."""

    def __init__(self) -> None:
        raise ValueError("learner.threads is 0")

    def ping(self) -> None:
        pass


@pytest.mark.usefixtures("ray_cluster")
def test_an_actor_that_could_not_be_made_says_why() -> None:
    refusing = ray.remote(Refusing).options(num_cpus=0).remote()
    with pytest.raises(ray.exceptions.ActorDiedError) as caught:
        ray.get(refusing.ping.remote(), timeout=480)
    assert first_line(caught.value) == "ValueError: learner.threads is 0"


class Idle:
    """Does nothing."""


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("environment", [{}, {"env_vars": {"OF_ITS_OWN": "1"}}])
def test_the_place_of_an_actor_names_its_log(environment: dict[str, dict[str, str]]) -> None:
    # A process that Ray started for this job is named after it, one that it kept ready is not.
    idle = ray.remote(Idle).options(num_cpus=0, runtime_env=environment).remote()
    place = ray.get(idle.__ray_call__.remote(own_place), timeout=480)
    assert Path(place.logs + ".err").is_file()
    assert Path(place.logs + ".out").is_file()
