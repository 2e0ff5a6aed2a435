"""HPSv3 (arXiv 2508.03789): Qwen2-VL reads picture and prompt, a head on its last token rates both.

Its package needs an old transformers; here its checkpoint runs on today's Qwen2-VL.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError

if TYPE_CHECKING:
    from torch import Tensor, nn

MODEL = "Qwen2VLForConditionalGeneration"
PIXELS = 256 * 28 * 28
"""Of a picture as it is read, whatever its size; its sides stay multiples of 28."""
BEFORE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
)
PICTURE_END, REWARD = "<|vision_end|>", "<|Reward|>"
"""What follows the picture, and the token whose state is rated: the package adds it to Qwen2-VL's.
What its conversation has behind that token changes nothing: attention looks back alone."""
QUESTION = Path(__file__).with_name("hpsv3_question.txt")
RENAMED = [
    (r"^(model\.)?visual\.", "vision."),
    (r"^model\.(language_model\.)?", "text."),
    (r"^rm_head\.", "head."),
]
"""Names in the checkpoint, as an old or a new transformers saves it -> names in ``build_model``."""
HEAD = (0, 3, 5)
"""The head's linear layers; between them stand ReLUs, one where training had dropout, too."""


class HpsV3Scorer(RewardScorer):
    """The mean of the two numbers that the model gives; higher is better, there are no bounds."""

    class Options(Section):
        checkpoint: str
        """``HPSv3.safetensors``."""
        base: str
        """Folder with Qwen2-VL-7B-Instruct's config.json, preprocessor_config.json and tokenizer;
        its weights are not read."""
        dtype: Literal["float32", "bfloat16"] = "float32"
        """What Qwen2-VL computes in; published scores are bfloat16's. The head is float32's."""

    kind = "hpsv3"

    @classmethod
    def check_files(cls, options: Options) -> None:
        _load(options, "meta")

    def __init__(self, options: Options, device: str) -> None:
        import torch
        from transformers import Qwen2VLImageProcessor

        from g2rpo_ray.rewards.scorers.clip_features import DTYPES

        self._tokenizer, self._model = _load(options, device)
        self._device, self._dtype = torch.device(device), DTYPES[options.dtype]
        self._model.to(self._device, self._dtype).eval()
        self._model["head"].float()
        self._question = QUESTION.read_text(encoding="utf-8")
        self._processor: Any = Qwen2VLImageProcessor.from_pretrained(
            resolve_path(options.base), local_files_only=True
        )

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        with torch.inference_mode():
            seen = self._seen(pictures)
            before, asked = self._encode(BEFORE, True), {p: self._asked(p) for p in set(prompts)}
            texts = [torch.tensor(asked[prompt]) for prompt in prompts]
            read = pad_sequence(texts, batch_first=True).to(self._device)
            embed: Any = self._model["text"].embed_tokens
            start = embed(torch.tensor(before, device=self._device)).expand(len(seen), -1, -1)
            states = self._model["text"](
                inputs_embeds=torch.cat([start, seen, embed(read)], dim=1), use_cache=False
            ).last_hidden_state
            # Padding stands behind the token that is rated, which does not see it.
            last = torch.tensor([len(text) for text in texts], device=self._device)
            places = len(before) + seen.shape[1] + last - 1
            rated = self._model["head"](states[torch.arange(len(states)), places].float())
            return rated[:, 0].cpu()

    def _seen(self, pictures: Tensor) -> Tensor:
        """uint8 ``[B, H, W, 3]`` -> the pictures' embeddings ``[B, N, D]``."""
        import torch
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        from g2rpo_ray.rewards.scorers.preprocess import ClipPreprocess, to_device

        it = self._processor
        height, width = pictures.shape[1:3]
        try:
            size = smart_resize(height, width, it.patch_size * it.merge_size, PIXELS, PIXELS)
        except ValueError as error:
            raise ScorerError(f"pictures of {height}x{width}: {error}") from error
        squash = ClipPreprocess(size, it.image_mean, it.image_std, "squash")
        images = squash(to_device(pictures, self._device)).to(self._dtype)
        patches, rows, columns = it.patchify(
            images, it.patch_size, it.merge_size, it.temporal_patch_size
        )
        grid = torch.tensor([[1, rows, columns]] * len(pictures), device=self._device)
        seen = self._model["vision"](patches.flatten(0, 1), grid).pooler_output
        return seen.unflatten(0, (len(pictures), -1))

    def _asked(self, prompt: str) -> list[int]:
        question = self._question.replace("{prompt}", prompt)
        end, reward = self._tokenizer.convert_tokens_to_ids([PICTURE_END, REWARD])
        return [end, *self._encode(question, False), reward]

    def _encode(self, text: str, markers: bool) -> list[int]:
        """``markers``: whether the likes of <|vision_end|> count as such; not where users write."""
        tokens: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=not markers
        )
        return tokens


def _load(options: HpsV3Scorer.Options, device: str) -> tuple[Any, nn.ModuleDict]:
    """Tokenizer and model; on ``meta`` of the checkpoint its header alone is read.

    Raises:
        ScorerError: a file is missing, damaged, or of another model.
    """
    from g2rpo_ray.rewards.scorers.checkpoint_file import load_state_dict, load_weights, renamed

    checkpoint, base = resolve_path(options.checkpoint), resolve_path(options.base)
    tokenizer = _read_tokenizer(base)
    # lm_head writes texts, and goes.
    state = {
        renamed(name, RENAMED): tensor
        for name, tensor in load_state_dict(checkpoint, device).items()
        if not name.startswith("lm_head.")
    }
    model = build_model(state, checkpoint, base)
    load_weights(model, state, checkpoint, assign=True)
    rows = len(state["text.embed_tokens.weight"])
    if rows != len(tokenizer):
        raise ScorerError(
            f"{checkpoint}: {rows} embeddings, and {base}'s tokenizer with {REWARD} has "
            f"{len(tokenizer)} tokens: one is of another model"
        )
    return tokenizer, model


def _read_tokenizer(base: Path) -> Any:
    from g2rpo_ray.rewards.scorers.pretrained import read_tokenizer

    tokenizer = read_tokenizer(base, MODEL)
    known = tokenizer.get_added_vocab()
    missing = [it for it in dict.fromkeys(re.findall(r"<\|\w+\|>", BEFORE + PICTURE_END))
               if it not in known]  # fmt: skip
    if missing:
        raise ScorerError(f"{base}: its tokenizer lacks {', '.join(missing)}; expected Qwen2-VL's")
    tokenizer.add_tokens([REWARD], special_tokens=True)
    return tokenizer


def build_model(state: dict[str, Tensor], checkpoint: Path, base: Path) -> nn.ModuleDict:
    """Qwen2-VL's two parts and the head, on no device yet, in the sizes of config and weights.

    Raises:
        ScorerError: the weights lack what the sizes are read from, or are another model's.
    """
    import torch
    from torch import nn
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

    config = Qwen2VLConfig.from_pretrained(base, local_files_only=True)
    try:
        config.text_config.vocab_size = len(state["text.embed_tokens.weight"])
        shapes = [state[f"head.{place}.weight"].shape for place in HEAD]
    except KeyError as error:
        raise ScorerError(
            f"{checkpoint}: no {error}; expected HPSv3's tensors (rm_head.0, 3 and 5, and "
            "Qwen2-VL's)"
        ) from error
    if shapes[-1][0] != 2:
        raise ScorerError(
            f"{checkpoint}: rm_head.{HEAD[-1]} gives {shapes[-1][0]} numbers; HPSv3's gives "
            "two, mean and deviation"
        )
    with torch.device("meta"):
        vision = qwen.Qwen2VisionTransformerPretrainedModel(config.vision_config)
        text = qwen.Qwen2VLTextModel(config.text_config)
        head = nn.Sequential(*(nn.ReLU() for _ in range(HEAD[-1] + 1)))
        for place, (given, taken) in zip(HEAD, shapes, strict=True):
            head[place] = nn.Linear(taken, given)
    # Made apart, off the meta device, where they would have no values.
    text.rotary_emb = qwen.Qwen2VLRotaryEmbedding(config.text_config)
    text.rotary_emb.inv_freq = text.rotary_emb.inv_freq.bfloat16().float()
    vision.rotary_pos_emb = _vision_rotary(config.vision_config)
    return nn.ModuleDict({"vision": vision, "text": text, "head": head})


def _vision_rotary(config: Any) -> nn.Module:
    """Positions of the patches in bfloat16: frequencies, angles, sines. The published model was
    cast whole, in training and for its scores."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionRotaryEmbedding

    class Rounded(Qwen2VLVisionRotaryEmbedding):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG002
            angles = position_ids[..., None].bfloat16() * self.inv_freq.bfloat16()
            waves = (angles.cos().float(), angles.sin().float())
            return tuple(self.recomposition_frequencies(it) for it in waves)

    return Rounded(config)
