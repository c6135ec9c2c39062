"""What a round costs where the target is spread over devices: bytes, seconds and what drafting gains there, without running it.

A target on N devices: by tensor parallelism (each layer's matrices in N parts, two all-reduces a layer), as a pipeline (a part of the layers on
each device, which one batch passes one after the other), or with a share of its weights in main memory, sent over at each forward. The draft is
whole on the first device. docs/scaling.md has the formulas and what they leave out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


GAMMAS = range(1, 17)  # draft lengths that are looked at


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder whose layers are attention with grouped keys and a gated MLP."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """As a Transformers config says. Raises: `ValueError`, one line, where it does not."""
        import torch
        from transformers import AutoModelForCausalLM

        config = config.get_text_config(decoder=True)
        try:
            heads = config.num_attention_heads
            shape = cls(
                config.num_hidden_layers, config.hidden_size, config.intermediate_size, heads,
                getattr(config, "num_key_value_heads", None) or heads,
                getattr(config, "head_dim", None) or config.hidden_size // heads, config.vocab_size,
            )  # fmt: skip
        except AttributeError as error:
            raise ValueError(
                f"a plan needs a decoder of attention and MLP layers, and {config.model_type} has no {error.name}"
            ) from None
        with torch.device("meta"):
            modules = AutoModelForCausalLM.from_config(config).modules()
        matrices = sum(its.weight.numel() for its in modules if isinstance(its, torch.nn.Linear))
        if matrices != shape.weights:
            raise ValueError(
                f"a plan needs a decoder whose layers are attention and one gated MLP, and {config.model_type} has other matrices"
            )
        return shape

    @property
    def weights(self) -> int:
        """Numbers that a forward multiplies by: all matrices but the embeddings that are looked up."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary

    def states(self, tokens: int) -> int:
        """Keys and values of `tokens` cached tokens, in numbers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens


@dataclass(frozen=True)
class Link:
    """Between two devices. latency: seconds of a message that holds next to nothing; speed: bytes a second, in one direction."""

    latency: float
    speed: float

    def all_reduce(self, ranks: int, size: float) -> float:
        """Seconds to add up `size` bytes of each rank, in a ring."""
        return 0.0 if ranks == 1 else self.latency + 2 * (ranks - 1) / ranks * size / self.speed

    def gather(self, ranks: int, size: float) -> float:
        """Seconds to bring `size` bytes, of which each rank has a part, to all."""
        return 0.0 if ranks == 1 else self.latency + (ranks - 1) / ranks * size / self.speed

    def send(self, size: float) -> float:
        """Seconds to hand `size` bytes on."""
        return self.latency + size / self.speed


@dataclass(frozen=True)
class Load:
    """What is decoded. rows: texts of a batch; context: tokens of each that are cached; width: bytes of a number."""

    rows: int
    context: int
    width: int = 2


Seconds = Callable[[int], float]
"""Of a forward over so many tokens of each row."""


@dataclass(frozen=True)
class Device:
    """memory: bytes a second that it reads; flops: a second; overhead: seconds of a layer that neither explains."""

    memory: float
    flops: float
    overhead: float = 0.0

    def forward(self, shape: Shape, load: Load, parts: int = 1) -> Seconds:
        """Of one of `parts` equal parts of a model: by what it reads or what it multiplies, whichever takes longer."""
        read = load.width * (shape.weights + shape.states(load.rows * load.context)) / parts
        score = 2 * shape.layers * shape.heads * shape.head_dim * load.context
        each = 2 * load.rows * (shape.weights + score) / parts
        return lambda tokens: max(read / self.memory, each * tokens / self.flops) + shape.layers * self.overhead


def tensor_parallel(part: Seconds, shape: Shape, load: Load, ranks: int, link: Link) -> tuple[Seconds, Seconds]:
    """Of a forward, and of that what the link takes; `part`: what one rank computes."""

    def over_link(tokens: int) -> float:
        size = load.rows * tokens * load.width
        layers = (2 * shape.layers + 1) * link.all_reduce(
            ranks, size * shape.hidden
        )  # two a layer, and the embeddings
        return (
            layers + link.gather(ranks, size * shape.vocabulary) + (link.latency if ranks > 1 else 0.0)
        )  # what is fed, told

    return lambda tokens: part(tokens) + over_link(tokens), over_link


def pipeline(whole: Seconds, shape: Shape, load: Load, ranks: int, link: Link) -> tuple[Seconds, Seconds]:
    """As `tensor_parallel`: one batch passes the devices one after the other, so only the weights are shared out."""

    def over_link(tokens: int) -> float:
        size = load.rows * tokens * load.width
        hops = (ranks - 1) * link.send(size * shape.hidden)
        return hops + (link.send(size * shape.vocabulary) if ranks > 1 else 0.0)  # the logits, back to the first

    return lambda tokens: whole(tokens) + over_link(tokens), over_link


def offloaded(whole: Seconds, shape: Shape, load: Load, share: float, link: Link) -> tuple[Seconds, Seconds]:
    """As `tensor_parallel`: a `share` of the weights comes over the link at each forward, however many tokens it is of."""

    def over_link(tokens: int) -> float:
        return link.send(share * load.width * shape.weights) if share else 0.0

    return lambda tokens: whole(tokens) + over_link(tokens), over_link


def tokens_a_round(acceptance: float, gamma: int) -> float:
    """Expected new tokens of a round, each drafted token accepted with probability `acceptance` (Leviathan et al. 2023, Equation 1)."""
    return float(sum(acceptance**n for n in range(gamma + 1)))


@dataclass(frozen=True)
class Round:
    """Rounds with the draft length that gains most. Times in seconds."""

    gamma: int
    target_step: float  # one token of each row
    block: float  # γ + 1 tokens of each row
    link: float  # of the block, over the link
    draft_step: float
    seconds: float
    tokens: float  # of each row
    gain: float  # times the target alone, spread the same way


def best_round(
    target: tuple[Seconds, Seconds], draft_step: float, acceptance: float, overhead: float = 0.0, gammas: Sequence[int] = GAMMAS
) -> Round:  # fmt: skip
    """The `Round` of the draft length in `gammas` that gains most. overhead: seconds of a round beside its forwards."""
    seconds, over_link = target

    def at(gamma: int) -> Round:
        block = seconds(gamma + 1)
        whole, tokens = gamma * draft_step + block + overhead, tokens_a_round(acceptance, gamma)
        return Round(
            gamma, seconds(1), block, over_link(gamma + 1), draft_step, whole, tokens, tokens * seconds(1) / whole
        )

    return max((at(gamma) for gamma in gammas), key=lambda its: its.gain)


def part_of(config: Any, ranks: int) -> Any:
    """The config of a model that computes what one of `ranks` computes of `config`'s, but for what they tell each other.

    Raises: `ValueError`, one line, where its heads or matrices cannot be shared out so.
    """
    import torch

    shape, config = Shape.of(config), config.get_text_config(decoder=True)
    sizes = {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
    }
    for name, size in sizes.items():
        if size % ranks:
            raise ValueError(f"tensor parallelism over {ranks} ranks: {name} is {size}, which {ranks} does not divide")
    sizes = {name: size // ranks for name, size in sizes.items()} | {"vocab_size": -(-shape.vocabulary // ranks)}
    part = type(config)(**config.to_dict() | sizes)
    part.head_dim, part.tie_word_embeddings, part.dtype = shape.head_dim, False, torch.float32
    part.pad_token_id = part.bos_token_id = part.eos_token_id = None
    return part
