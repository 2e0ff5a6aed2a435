"""Before a run loads anything: whether its roles fit on the cluster's cards."""

from g2rpo_ray.cluster.cards import memory_of_cards
from g2rpo_ray.cluster.demand import ClusterError, living_nodes
from g2rpo_ray.cluster.placement import Tell
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config import Config
from g2rpo_ray.plan.small_cards import problem_of_cards


def check_cards(config: Config, tell: Tell) -> None:
    """Compare ``g2rpo plan`` with the cards that are there; what is not known is told.

    Raises:
        ClusterError: the roles of a card need clearly more than the largest one has.
    """
    shares = [config.rollout.gpus_per_worker, config.learner.gpus_per_rank]
    if not any(shares):
        return
    cards_gib, unknown = memory_of_cards(living_nodes())
    for why in unknown:
        tell(f"memory of cards is not compared with the plan: {why}")
    if not cards_gib:
        return
    try:
        problem, is_certain = problem_of_cards(config, cards_gib)
    except InputError as error:
        tell(f"memory of cards is not compared with the plan: {error}")
        return
    if problem and is_certain and config.cluster.refuse_small_cards:
        raise ClusterError(
            f"{problem}. Nothing was loaded; cluster.refuse_small_cards=false tries it anyway"
        )
    if problem:
        tell(f"warning: {problem}")
