"""Diversity of one prompt's pictures: how far apart they lie for a CLIP model."""

from collections.abc import Sequence

from g2rpo_ray.rewards.scorer import Tensor
from g2rpo_ray.rewards.scorers.clip import ClipScorer


class DiversityScorer(ClipScorer):
    """Mean cosine distance of a picture to the other pictures of its prompt in the same request.

    Its mean over a prompt's pictures is their mean pairwise distance. A picture that is alone has
    no diversity: NaN, never 0.
    """

    kind = "diversity"
    compares_pictures = True
    reads_prompts = False

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        import torch

        features = self._features.image(pictures).cpu()
        distances = 1 - features @ features.T
        same = torch.tensor([[one == other for other in prompts] for one in prompts])
        same.fill_diagonal_(False)
        # 0 / 0 is NaN: no other picture to compare with.
        return (distances * same).sum(dim=1) / same.sum(dim=1)
