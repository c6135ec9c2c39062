"""Pairs of random models whose agreement is set by construction, so that speed can be measured without trained weights.

Both models are plain Transformers classes of any size. Token t's embedding is a random vector, and the output embedding of
its one successor is the same vector, so the successor's logit is far above all others. The layers between are random and fully read,
but their contribution is too small to change a choice. All successors of the target form one cycle through the vocabulary. The draft has the
same successor for a share of the tokens, and another one for the rest. In greedy decoding this share is the probability that
a drafted token after a right one is right.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BatchEncoding


LOGIT = 20.0  # of the successor, in nats; of all others about ± LOGIT / √hidden_size
UNSURE = 0.5  # share of it for a hesitating draft, whose distribution is then nearly flat
LAST = ("o_proj", "out_proj", "down_proj")  # the matrices through which a layer's parts add to what is between layers
WHISPER = 1e-4  # standard deviation of the layers' last matrices: what they add stays far below an embedding


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder, in the names of Transformers' configs."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    def settings(self) -> dict[str, Any]:
        """Return arguments of `AutoConfig.for_model`."""
        return asdict(self)


@dataclass(frozen=True)
class Shape:
    """Arguments of `AutoConfig.for_model` for a model that `Size` cannot describe, such as a hybrid."""

    fields: dict[str, Any]

    def settings(self) -> dict[str, Any]:
        return dict(self.fields)


@dataclass(frozen=True)
class Synthetic:
    """A pair by its sizes."""

    name: str
    target: Size | Shape
    draft: Size | Shape
    vocabulary: int


SMALL = Synthetic("6M/1M", Size("llama", 256, 704, 6, 4, 2, 64), Size("llama", 128, 352, 1, 2, 1, 64), vocabulary=4096)
LARGE = (
    Synthetic(
        "1.5B/0.15B",
        Size("qwen2", 1536, 8960, 28, 12, 2, 128),
        Size("qwen2", 640, 2560, 10, 10, 2, 64),
        vocabulary=151936,
    ),
    Synthetic(
        "8B/0.6B",
        Size("qwen3", 4096, 12288, 36, 32, 8, 128),
        Size("qwen3", 1024, 3072, 28, 16, 8, 128),
        vocabulary=151936,
    ),
)


def models(
    pair: Synthetic,
    agreement: float,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    hesitates: float = 0.7,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Return target and draft, which agree about the next token at a share `agreement` of all tokens.

    `hesitates`: the share of the other tokens at which the draft is unsure, for stops that read its distribution.
    """
    for name, value in (("agreement", agreement), ("hesitates", hesitates)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: expected a number from 0 to 1, got {value}")
    generator = torch.Generator().manual_seed(seed)
    cycle = torch.randperm(pair.vocabulary, generator=generator)
    successor = torch.empty_like(cycle)
    successor[cycle] = cycle.roll(-1)
    others = torch.randperm(pair.vocabulary, generator=generator)[round(agreement * pair.vocabulary) :]
    drafted = successor.clone()
    drafted[others] = successor[others].roll(1)
    certainty = torch.ones(pair.vocabulary)
    certainty[others[: round(hesitates * len(others))]] = UNSURE
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        target = model(pair.target, pair.vocabulary, successor, torch.ones_like(certainty), dtype, device)
        draft = model(pair.draft, pair.vocabulary, drafted, certainty, dtype, device)
    return target, draft


def model(
    size: Size | Shape,
    vocabulary: int,
    successor: torch.Tensor,
    certainty: torch.Tensor,
    dtype: torch.dtype,
    device: Any,
) -> Any:
    """Build a decoder whose favourite after token t is `successor[t]`, with a logit of `LOGIT · certainty[t]`; both (V,)."""
    shape = size.settings()
    config = AutoConfig.for_model(
        shape.pop("model_type"),
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        max_position_embeddings=32768,
        **shape,
    )
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None  # no sequence ends early
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, module in made.named_modules():
        if name.rpartition(".")[2] in LAST:
            module.weight.normal_(std=WHISPER)
    # Of length √hidden_size, so that the last norm leaves them as they are.
    width = config.hidden_size
    table = torch.randn(vocabulary, width, device=device)
    table *= width**0.5 / table.norm(dim=1, keepdim=True)
    made.get_input_embeddings().weight.copy_(table)
    rows = table * (certainty.to(table)[:, None] * LOGIT / width)
    made.get_output_embeddings().weight[successor.to(device)] = rows.to(dtype)
    return made


def prompts(pair: Synthetic, count: int, length: int, seed: int = 1) -> list[list[int]]:
    """Return `count` random prompts of `length` token ids each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(pair.vocabulary, (count, length), generator=generator).tolist()


def tokenizer(texts: list[list[int]], **_: Any) -> BatchEncoding:
    """Return token ids in a tokenizer's form; all of one length."""
    ids = torch.tensor(texts)
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def bytes_needed(pair: Synthetic, dtype: torch.dtype) -> int:
    """Return the approximate bytes of both models' weights."""
    sizes = [size for size in (pair.target, pair.draft) if isinstance(size, Size)]
    assert len(sizes) == 2, "of a `Shape` nothing is known"
    return sum(numbers(size, pair.vocabulary) for size in sizes) * dtype.itemsize


def numbers(size: Size, vocabulary: int) -> int:
    """Return the number of a model's weights, without norms and biases."""
    heads = 2 * (size.num_attention_heads + size.num_key_value_heads) * size.head_dim
    layer = size.hidden_size * (heads + 3 * size.intermediate_size)
    return 2 * vocabulary * size.hidden_size + size.num_hidden_layers * layer
