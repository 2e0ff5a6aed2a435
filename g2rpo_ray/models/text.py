"""Prompt encoders: T5 tokens and CLIP's pooled embedding, as FluxPipeline computes them."""

import torch

from g2rpo_ray.config import ModelSection
from g2rpo_ray.models.conditioning import PromptEmbeds
from g2rpo_ray.models.loading import DTYPES, load_part


class TextEncoder:
    """Both text encoders of FLUX.

    Prompts are encoded one at a time: an embedding is a function of its text alone.
    """

    def __init__(self, model: ModelSection, max_sequence_length: int, device: str = "cpu") -> None:
        dtype = DTYPES[model.dtype]
        self.device = device
        self.max_sequence_length = max_sequence_length
        self.clip = load_part(model, "text_encoder", dtype).to(device)
        self.t5 = load_part(model, "text_encoder_2", dtype).to(device)
        self.clip_tokenizer = load_part(model, "tokenizer", dtype)
        self.t5_tokenizer = load_part(model, "tokenizer_2", dtype)

    @torch.no_grad()  # not inference_mode: the learner's graph takes embeddings in
    def encode(self, text: str) -> PromptEmbeds:
        """Embeddings of one prompt, on the CPU; longer texts are cut to the encoders' lengths."""
        pooled = self.clip(self._tokens(self.clip_tokenizer, text, 0)).pooler_output
        t5 = self.t5(self._tokens(self.t5_tokenizer, text, self.max_sequence_length))[0]
        return PromptEmbeds(t5=t5[0].cpu(), pooled=pooled[0].cpu())

    def _tokens(self, tokenizer: object, text: str, length: int) -> torch.Tensor:
        tokens: torch.Tensor = tokenizer(  # type: ignore[operator]
            [text],
            padding="max_length",
            max_length=length or tokenizer.model_max_length,  # type: ignore[attr-defined]
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return tokens.to(self.device)
