"""Makes the folders beside it: DFlash drafters with random weights, and what the `dflash` package works out with them.

    pip install dflash==0.1.0                               # in an environment of its own
    python tests/drafters/dflash_golden/make.py

golden.safetensors: `embedding` and `head` (V, H), as a target's; `states` (1, T, layers · H) and `ids` (1, T) of a text; and `logits` (2, block − 1, V) of
the blocks behind its first `FIRST` tokens and, two tokens later, behind `FIRST` + 2 of them: of the first block one token was accepted.
"""

from pathlib import Path

import torch
from dflash.model import DFlashDraftModel
from safetensors.torch import save_file
from transformers import DynamicCache, Qwen3Config

from hf_lossy_assist.models.facts import CACHE


VOCABULARY, WIDTH, TOKENS, FIRST = 61, 16, 12, 7
CASES = {
    "one-layer": {"layers": 1, "block": 4, "ids": [0, 2]},
    "two-layers": {"layers": 2, "block": 6, "ids": [1, 3, 4]},
}


def make(folder: Path, seed: int, *, layers: int, block: int, ids: list[int]) -> None:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, layer_types=["full_attention"] * layers,
    )  # fmt: skip
    config.dflash_config = {"target_layer_ids": ids, "block_size": block, "mask_token_id": VOCABULARY - 1}
    config._attn_implementation, config.num_target_layers = "sdpa", 8
    torch.manual_seed(seed)
    model = DFlashDraftModel(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    embedding, head = torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY, WIDTH)
    states, text = torch.randn(1, TOKENS, len(ids) * WIDTH), torch.randint(0, VOCABULARY - 1, (1, TOKENS))
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    logits, known = [], 0
    for length in (FIRST, FIRST + 2):  # the last of them has no states yet
        block_ids = torch.full((1, block), VOCABULARY - 1)
        block_ids[0, 0] = text[0, length - 1]
        with torch.no_grad():
            hidden = model(
                target_hidden=states[:, known : length - 1], noise_embedding=embedding[block_ids],
                position_ids=torch.arange(known, length - 1 + block)[None], **{CACHE: cache}, use_cache=True,
            )  # fmt: skip
        cache.crop(-(cache.get_seq_length() - (length - 1)))
        logits.append(hidden[0, 1:] @ head.T)
        known = length - 1
    assert not any(bool(row.isnan().any()) for row in logits)
    model.save_pretrained(folder)
    golden = {"embedding": embedding, "head": head, "states": states, "ids": text, "logits": torch.stack(logits)}
    save_file({name: tensor.contiguous() for name, tensor in golden.items()}, folder / "golden.safetensors")


if __name__ == "__main__":
    for seed, (name, settings) in enumerate(CASES.items()):
        make(Path(__file__).with_name(name), seed, **settings)
