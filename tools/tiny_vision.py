"""Pictures for tiny vision models: random tensors in the shapes of each family's processor, and their placeholder tokens.

A picture takes the tokens `Seen.piece` in the sequence; `prompts` puts any number of them into each row. There are no real images
and no processors: the comparison is between two ways of decoding the same tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_sizes import PAD, ROPE, VOCABULARY


IMAGE, START, END, VIDEO = VOCABULARY - 1, VOCABULARY - 2, VOCABULARY - 3, VOCABULARY - 4
WORDS = VOCABULARY - 8  # token ids below it are text
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Seen:
    """How pictures are passed to one model type.

    Args:
        piece: the tokens of one picture.
        tensors: from the number of pictures in each row and a generator, the model's inputs besides the tokens.
        changes: changes of the tiny config.
        types: the name of the token types that separate pictures (1) from text (0), if any.
    """

    piece: Sequence[int]
    tensors: Callable[[Sequence[int], torch.Generator], Tensors]
    changes: dict[str, Any] = field(default_factory=dict)
    types: str | None = None


def flat(*shape: int, **others: Any) -> Callable[[Sequence[int], torch.Generator], Tensors]:
    """Return `pixel_values` (pictures, *shape), the rows concatenated; `others`: further inputs per picture, by name."""
    return patches(1, *shape, **others)


def patches(each: int, *shape: int, **others: Any) -> Callable[[Sequence[int], torch.Generator], Tensors]:
    """Return `pixel_values` (patches, *shape), `each` per picture, the rows concatenated."""

    def tensors(counts: Sequence[int], generator: torch.Generator) -> Tensors:
        n = sum(counts)
        more = {name: torch.tensor([value] * n) for name, value in others.items()}
        return {"pixel_values": torch.randn(n * each, *shape, generator=generator), **more}

    return tensors


def by_row(*shape: int) -> Callable[[Sequence[int], torch.Generator], Tensors]:
    """Return `pixel_values` (B, most pictures of a row, *shape), zeros if a row has fewer."""

    def tensors(counts: Sequence[int], generator: torch.Generator) -> Tensors:
        pictures = torch.randn(len(counts), max(counts), *shape, generator=generator)
        for row, count in enumerate(counts):
            pictures[row, count:] = 0
        return {"pixel_values": pictures}

    return tensors


TOKEN = {"image_token_id": IMAGE}
INDEX = {"image_token_index": IMAGE}
CLIP = {"vision_config": {"image_size": 16, "patch_size": 8}, "vision_feature_layer": -1}
SQUARE = flat(3, 16, 16)  # of 2 × 2 patches
QWEN = TOKEN | {"video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
MROPE = {"text_config": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}}}
WIDE = patches(24, 3 * 2 * 4 * 4, image_grid_thw=[1, 4, 6])  # 6 tokens to a picture once 2 × 2 are merged
TOWER = {"out_hidden_size": 32, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
NARROW = [START, *[IMAGE] * 6, END]
DEEP = TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
SIX = [[x, y] for y in range(6) for x in range(6)]  # places of patches, 3 × 3 of which are one token
GLM = {"image_start_token_id": START, "image_end_token_id": END, "video_start_token_id": VIDEO - 1, "video_end_token_id": VIDEO - 2}  # fmt: skip
QWEN35 = {"text_config": {"rope_parameters": ROPE | {"mrope_section": [1, 0, 0], "partial_rotary_factor": 0.25}}}


SEEN: dict[str, Seen] = {
    "llava": Seen([IMAGE] * 4, SQUARE, INDEX | CLIP),
    "vipllava": Seen([IMAGE] * 4, SQUARE, INDEX | {"vision_config": {"num_hidden_layers": 11}}),
    "gemma3": Seen([START, *[IMAGE] * 4, END], SQUARE, INDEX | {"mm_tokens_per_image": 4}, "token_type_ids"),
    "paligemma": Seen([IMAGE] * 4, SQUARE, INDEX | {"projection_dim": 32}),
    "mistral3": Seen([IMAGE] * 4, flat(3, 32, 32, image_sizes=[32, 32]), INDEX),
    "lighton_ocr": Seen([IMAGE] * 4, flat(3, 32, 32, image_sizes=[32, 32]), TOKEN),
    "idefics2": Seen([IMAGE] * 4, by_row(3, 16, 16), TOKEN | {"perceiver_config": {"resampler_n_latents": 4}}),
    "idefics3": Seen([IMAGE], by_row(3, 16, 16), TOKEN),
    "smolvlm": Seen([IMAGE] * 4, by_row(3, 32, 32), TOKEN | {"vision_config": {"image_size": 32}}),
    "qwen2_vl": Seen(NARROW, WIDE, QWEN | MROPE | {"vision_config": TOWER | {"hidden_size": 32, "embed_dim": 32}}, "mm_token_type_ids"),
    "qwen2_5_vl": Seen(NARROW, WIDE, QWEN | MROPE | {"vision_config": TOWER | {"fullatt_block_indexes": [1]}}, "mm_token_type_ids"),
    "qwen3_vl": Seen(NARROW, WIDE, QWEN | MROPE | {"vision_config": DEEP}, "mm_token_type_ids"),
    "qwen3_vl_moe": Seen(NARROW, WIDE, QWEN | MROPE | {"vision_config": DEEP}, "mm_token_type_ids"),
    "qwen3_5": Seen(NARROW, WIDE, QWEN | QWEN35 | {"vision_config": TOWER | {"num_position_embeddings": 64}}, "mm_token_type_ids"),
    "qwen3_5_moe": Seen(NARROW, WIDE, QWEN | QWEN35 | {"vision_config": TOWER | {"num_position_embeddings": 64}}, "mm_token_type_ids"),
    "glm4v": Seen(NARROW, WIDE, TOKEN | GLM | MROPE | {"video_token_id": VIDEO, "vision_config": TOWER}, "mm_token_type_ids"),
    "glm46v": Seen(NARROW, WIDE, TOKEN | GLM | MROPE | {"video_token_id": VIDEO, "vision_config": TOWER}, "mm_token_type_ids"),
    "llava_next": Seen([IMAGE] * 10, flat(2, 3, 16, 16, image_sizes=[16, 16]), INDEX | CLIP | {"image_grid_pinpoints": [[16, 16]]}),
    "llava_onevision": Seen([IMAGE] * 10, flat(2, 3, 16, 16, image_sizes=[16, 16]), INDEX | {"image_grid_pinpoints": [[16, 16]]}),
    "internvl": Seen([IMAGE], SQUARE, TOKEN | {"vision_config": {"image_size": [16, 16], "patch_size": [8, 8]}}),
    "cohere2_vision": Seen([IMAGE], SQUARE, TOKEN | {"downsample_factor": 2}),
    "aya_vision": Seen([IMAGE], SQUARE, INDEX | {"downsample_factor": 2}),
    "deepseek_vl": Seen([IMAGE] * 4, SQUARE, TOKEN),
    "got_ocr2": Seen([IMAGE], SQUARE, INDEX),
    "video_llama_3": Seen([IMAGE] * 6, patches(24, 3 * 4 * 4, image_grid_thw=[1, 4, 6], image_merge_sizes=2), TOKEN | {"vision_config": {"patch_size": 4}}),
    "qianfan_ocr": Seen([IMAGE], SQUARE, TOKEN | {"vision_config": {"image_size": [16, 16], "patch_size": [8, 8]}}),
    "ovis2": Seen([IMAGE] * 4, SQUARE, TOKEN | {"visual_indicator_token_ids": [90, 91, 92, 93, 94]}),
    "llava_next_video": Seen([IMAGE] * 10, flat(2, 3, 16, 16, image_sizes=[16, 16]), INDEX | CLIP | {"image_grid_pinpoints": [[16, 16]]}),
    "lfm2_vl": Seen([IMAGE] * 4, flat(16, 3 * 8 * 8, spatial_shapes=[4, 4], pixel_attention_mask=[1] * 16), TOKEN | {"projector_hidden_size": 32}),
    "gemma4": Seen([IMAGE] * 4, flat(36, 3 * 8 * 8, image_position_ids=SIX), TOKEN | {"audio_config": None}, "mm_token_type_ids"),
    "gemma4_unified": Seen([IMAGE] * 4, flat(4, 3 * 24 * 24, image_position_ids=[[0, 0], [1, 0], [0, 1], [1, 1]]), TOKEN, "mm_token_type_ids"),
    "kimi_k25": Seen([IMAGE] * 6, patches(24, 3, 8, 8, image_grid_thw=[1, 4, 6]), TOKEN | {"projection_hidden_size": 32}),
    "aria": Seen([IMAGE] * 4, flat(3, 16, 16, pixel_mask=[[True] * 16] * 16), {"image_token_index": IMAGE, "projector_patch_to_query_dict": {4: 4}}),
}  # fmt: skip


# What the rules of `tiny_models.py` get wrong, of types that nobody made pictures for.
CHANGES: dict[str, dict[str, Any]] = {
    "mllama": {"text_config": {"cross_attention_layers": [1], "num_hidden_layers": 3}},
    "glm4v_moe": {"text_config": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}},
    "glm_ocr": MROPE,
    "glmga": MROPE,
    "paddleocr_vl": MROPE,
    "qwen2_5_omni_thinker": MROPE,
    "cohere_compass": {"text_config": {"rope_parameters": {kind: dict(ROPE) for kind in ("full_attention", "sliding_attention")}}},
    "chameleon": {"vocabulary_map": {"<image>": IMAGE, "IMGIMGA": 90}},
    "emu3": {"vocabulary_map": {"<image>": IMAGE, "<|visual token 000000|>": 90}},
}  # fmt: skip


def prompts(seen: Seen, counts: Sequence[int], seed: int) -> Tensors:
    """Return left-padded random prompts with `counts[b]` pictures in row b; rows differ in length even with equal counts."""
    generator = torch.Generator().manual_seed(seed)

    def words(number: int) -> list[int]:
        return torch.randint(4, WORDS, (number,), generator=generator).tolist()

    rows = []
    for b, count in enumerate(counts):
        text = words(2 + b)
        for _ in range(count):
            text += [*seen.piece, *words(2)]
        rows.append(text + words(3 + 2 * b))
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    out = {"input_ids": ids, "attention_mask": mask}
    if sum(counts):
        out |= seen.tensors(counts, generator)
    if seen.types:
        out[seen.types] = (ids == IMAGE).long()
    return out
