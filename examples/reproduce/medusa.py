"""Medusa's heads as a drafter of the package: each head reads the target's last state and proposes the token at one place ahead.

From "Medusa" (Cai et al. 2024, huggingface.co/papers/2401.10774), Medusa-1: the target is frozen, a head is a residual SiLU block before a copy of the
target's output head, and head k has weight 0.8^k in the loss. The paper drafts a tree; drafts here are chains. A place's distribution depends on the state alone,
not on the tokens drafted before it, and strict acceptance is passed exactly that distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from target_texts import write_texts
from transformers import PretrainedConfig, PreTrainedModel

from hf_lossy_assist.demo import Demo
from hf_lossy_assist.drafters.hidden_state import HiddenStateDrafter
from hf_lossy_assist.drafters.networks.base import HiddenStateNetwork, Memory, Stack
from hf_lossy_assist.models.hidden_state_hook import NORMED
from hf_lossy_assist.models.introspection import vocabulary_of
from hf_lossy_assist.round import Reading
from hf_lossy_assist.tasks.load import DemoTask


DECAY = 0.8  # ratio of a head's weight in the loss to that of the head before it

HEADS, STEPS, STATES, LEARNING_RATE = 5, 600, 1024, 2e-3  # steps of training, and the states of each


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes: `layer` is the target's config."""

    layer: PretrainedConfig
    target_hidden_size: int
    draft_vocab_size: int
    reduced: ClassVar[bool] = False
    sights: ClassVar[tuple[()]] = ()

    def layers_of(self, blocks: int) -> tuple[int, ...]:
        return (NORMED,)  # what the target's output head reads


class MedusaNetwork(HiddenStateNetwork):
    """The heads; untrained, each predicts the token after the state's, as the target does."""

    embed_tokens = lm_head = norm = None
    reads_tokens: ClassVar[bool] = False

    def __init__(self, target: PreTrainedModel, heads: int = HEADS):
        super().__init__()
        head = target.get_output_embeddings()
        size, width = head.weight.shape
        self.config = MedusaConfig(target.config, width, size)
        self.rotary_emb = torch.nn.Identity()
        self.layers = torch.nn.ModuleList()  # none attends to the text, so there is no cache
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(heads))
        self.heads = torch.nn.ModuleList(torch.nn.Linear(width, size, bias=False) for _ in range(heads))
        for parameter in self.parameters():
            parameter.data = (
                head.weight.clone() if parameter.shape == head.weight.shape else torch.zeros_like(parameter)
            )
        self.to(head.weight.dtype)

    @property
    def norm_weight(self) -> torch.Tensor:
        return self.blocks[0].get_parameter("weight")  # for the network's dtype and device

    @property
    def longest(self) -> int:
        return len(self.heads)

    def step(
        self, stack: Stack, inputs: torch.Tensor, cached: torch.Tensor, number: torch.Tensor, memory: Memory
    ) -> tuple[torch.Tensor, Memory]:
        return self(memory[0], int(number)), memory

    def learn(self, stack: Stack, reading: Reading) -> Memory:
        """Keep the state of the last token that the target has read of each row."""
        return (reading.states[torch.arange(len(reading.last), device=reading.states.device), reading.accepted],)

    def forward(self, states: torch.Tensor, place: int) -> torch.Tensor:
        """Return the logits (…, V) of the token `place` + 2 tokens after the state's, for `states` (…, H)."""
        return self.heads[place](states + torch.nn.functional.silu(self.blocks[place](states)))


@dataclass(frozen=True, eq=False)
class MedusaDrafter(HiddenStateDrafter):
    """Trained heads, which draft up to as many tokens a round as there are. Args: see `HiddenStateDrafter`."""

    network: MedusaNetwork
    kind: ClassVar[str] = "a Medusa drafter"
    model_type: ClassVar[str] = "medusa"
    networks: ClassVar[tuple[type, ...]] = (MedusaNetwork,)

    def check_tokens(self, base: PreTrainedModel) -> None:
        if vocabulary_of(base) != self.network.config.draft_vocab_size:
            raise ValueError(
                f"{self.name} has {self.network.config.draft_vocab_size} tokens, and the target {vocabulary_of(base)}: it is another target's"
            )


def fit_medusa(target: PreTrainedModel, texts: Sequence[torch.Tensor], steps: int = STEPS) -> MedusaNetwork:
    """Train heads on `texts` (n,) int64, which the target wrote, by their states in `target`."""
    network, generator = MedusaNetwork(target), torch.Generator().manual_seed(0)
    long = [text for text in texts if len(text) > HEADS + 1]
    with torch.no_grad():
        states = torch.cat([target.get_decoder()(text[None]).last_hidden_state[0, : -HEADS - 1] for text in long])
    ahead = torch.cat(
        [text[2:].unfold(0, HEADS, 1) for text in long]
    )  # (n, heads): the target wrote the next one itself
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for _ in range(steps):
        chosen = torch.randint(len(ahead), (STATES,), generator=generator)
        logits = [network(states[chosen], place) for place in range(HEADS)]
        losses = map(torch.nn.functional.cross_entropy, logits, ahead[chosen].unbind(dim=1))
        optimizer.zero_grad()
        torch.stack([DECAY**place * loss for place, loss in enumerate(losses)]).sum().backward()
        optimizer.step()
    return network


def load_medusa(demo: Demo, file: Path, problems: int = 600, steps: int = STEPS) -> MedusaDrafter:
    """Return heads for the demo's target: those in `file`, or else new ones, trained on its greedy solutions of so many problems and stored there."""
    if not file.is_file():
        texts = write_texts(demo, DemoTask("calibration", seed=700).problems(problems), max_new_tokens=64)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(fit_medusa(demo.target, [text for text, _ in texts], steps).state_dict(), file)
    network = MedusaNetwork(demo.target)
    network.load_state_dict(load_file(file))
    return MedusaDrafter(network.eval().requires_grad_(False))
