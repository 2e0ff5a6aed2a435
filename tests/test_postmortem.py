"""What is said of an actor that died."""

import pytest
import ray

from g2rpo_ray.postmortem import first_line


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
        ray.get(refusing.ping.remote(), timeout=120)
    assert first_line(caught.value) == "ValueError: learner.threads is 0"
