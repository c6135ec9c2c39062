"""Hidden states of mined mismatches, the input of AutoJudge's head (Garipov et al., §3.2, huggingface.co/papers/2504.20039).

One forward per problem and model covers the whole text and every alternative token, like a block in verification: all positions in parallel. So the
target's states equal those of decoding up to the rounding of kernels. In decoding the draft's are computed token by token, which differs slightly
in half precision (the paper's Appendix C): there a head on the target alone is the safe choice. A model with a recurrent state reads each
alternative token in a separate forward.
"""

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from huggingface_hub.utils import tqdm
from transformers import DynamicCache, PreTrainedModel

from ...artifacts.features import FeatureSpec, FeatureTap
from ...models.facts import CACHE, facts_of
from ...models.probe import why_not_rows
from ...models.row_cache import RowLayer
from ...models.row_model import RowModel, layer_visibility
from .dataset import MinedTable
from .draft_predictions import PrefixReader, count_shared


WORTH_SHARING = 16  # tokens at the beginning of two texts


@torch.no_grad()
def read_hidden_states(
    model: PreTrainedModel, mined: MinedTable, position: str = "token", name: str = "model"
) -> torch.Tensor:
    """Read the last hidden states (after the final norm) for every mismatch, in the order of the rows.

    Args:
        model: a loaded decoder-only model that runs on rows of different lengths, in evaluation mode.
        position: "predicting" for the state at position t − 1, from whose logits the token at t is drawn; "token" for
            the state at t that encodes the draft's token.
        name: the model's role, for the progress bar and errors.

    Returns: (N, H) float32 on the CPU. Raises: `ValueError` for a model that does not support this kind of mask.
    """
    reason = why_not_rows(model)
    if reason is not None:
        raise ValueError(
            f"hidden states need a model that runs on rows of different length; the {name} does not: {reason}"
        )
    states = list[torch.Tensor]()
    with FeatureTap(model, FeatureSpec("target")) as tap:
        tree = None if facts_of(model).keeps_states else TreeForward(model, tap)
        problems = tqdm(mined.by_problem(), desc=f"states of the {name}", total=len(mined.texts), unit="problem")
        for problem, rows in problems:
            text, others, columns = _lay_out(mined, problem, rows, position)
            if tree is None:
                read, skipped = read_states_along(model, tap, len(mined.texts[problem][0]), text, others), 0
            else:
                read, skipped = tree(text, others, min(columns))
            states.append(read[[column - skipped for column in columns]].float().cpu())
    order = torch.cat([rows for _, rows in mined.by_problem()])
    return torch.cat(states)[order.argsort()]


def _lay_out(
    mined: MinedTable, problem: int, rows: torch.Tensor, position: str
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Return the text up to the last mismatch, the (token, position) pairs appended to it, and the columns to read.

    A token that the text contains is read there; any other is appended.
    """
    prompt, response = mined.texts[problem]
    positions = mined.position[rows].tolist()
    text = prompt + response[: max(positions) + 1]
    if position == "predicting":
        return text, [], [len(prompt) + t - 1 for t in positions]
    others, columns = list[tuple[int, int]](), list[int]()
    for t, token in zip(positions, mined.draft_token[rows].tolist(), strict=True):
        inside = response[t] == token
        columns.append(len(prompt) + t if inside else len(text) + len(others))
        if not inside:
            others.append((token, len(prompt) + t))
    return text, others, columns


def read_states_along(
    model: PreTrainedModel, tap: FeatureTap, prompt: int, text: list[int], others: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return the states (tokens, H) recorded by `tap` for a text followed by the `others`, reading tokens in sequence.

    For models in which a mask cannot give tokens different contexts. `others`: (token, position) pairs that replace the text's token there.
    """
    largest = max([*text, *(token for token, _ in others)])  # may exceed a draft's vocabulary
    reader, of_text = PrefixReader(RowModel(model, 1, len(text), largest + 1)), list[torch.Tensor]()
    of_others: dict[int, torch.Tensor] = {}
    for position, rows in groupby(sorted(range(len(others)), key=lambda i: others[i][1]), lambda i: others[i][1]):
        of_text.append(reader.read_states(text[:position], prompt, tap))
        for row in rows:
            alone = reader.model.copy()
            alone.feed(torch.tensor([[others[row][0]]]), [1])
            of_others[row] = tap.latest[0]
    of_text.append(reader.read_states(text, prompt, tap))
    return torch.cat([*of_text, *(of_others[i] for i in range(len(others)))])


class TreeForward:
    """Forward on a text and alternatives to its tokens under a 4-D mask; a prefix shared with the previous text is read once."""

    def __init__(self, model: PreTrainedModel, tap: FeatureTap):
        """`tap`: takes the states; its context must be active."""
        self.model, self.tap, self.facts = model, tap, facts_of(model)
        self.extra: dict[str, int] = {"logits_to_keep": 1} if self.facts.keeps_logits else {}
        plain = all(kind is RowLayer for kind in self.facts.layers or ())
        self.shares = plain and math.isinf(self.facts.reach) and self.facts.rope is None
        self.read, self.cache = list[int](), DynamicCache()  # the previous text, and its keys and values

    def __call__(self, text: list[int], others: list[tuple[int, int]], first: int) -> tuple[torch.Tensor, int]:
        """Return the states (n, H) of a text's last tokens and of the `others`, and the number of leading tokens, up to `first`, that were skipped.

        `others`: (token, position) pairs, each of which attends to the text before its position and to itself.
        """
        shared = min(count_shared(self.read, text), first) if self.shares else 0
        shared = shared if shared >= WORTH_SHARING else 0
        cache = DynamicCache()  # not `crop`, whose argument differs between releases
        for i, layer in enumerate(self.cache.layers if shared else ()):
            cache.update(layer.keys[:, :, :shared], layer.values[:, :, :shared], i)
        self.read, self.cache = text, cache
        device = self.facts.device
        tokens = torch.tensor(text + [token for token, _ in others], device=device)[None]
        at = torch.tensor([position for _, position in others], device=device, dtype=torch.long)
        positions = torch.cat([torch.arange(len(text), device=device), at])[None]
        masks = {kind: mask[:, :, shared:] for kind, mask in self._make_masks(positions, len(text)).items()}
        self.model(
            # As in decoding, ids outside a smaller draft vocabulary are clamped.
            input_ids=tokens[:, shared:].clamp(max=self.facts.input_size - 1),
            position_ids=positions[:, shared:],
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            **{CACHE: cache if self.shares else None},
            use_cache=self.shares,
            **self.extra,
        )
        return self.tap.latest[0], shared

    def _make_masks(self, positions: torch.Tensor, length: int) -> dict[str, torch.Tensor]:
        """Return an additive mask (1, 1, Q, Q) in the model's dtype for each kind of layer.

        `positions` (1, Q) are the `position_ids`; the first `length` tokens are the text. They do not attend to appended tokens, and an appended
        token attends to the text before its position and to itself.
        """
        width = positions.shape[1]
        alone = torch.eye(width, dtype=torch.bool, device=positions.device)
        added = torch.arange(length, width, device=positions.device)
        masks = {}
        for kind in self.facts.windows:
            seen = alone.clone()
            seen[:, :length] |= layer_visibility(self.facts, kind, positions, length)[0, 0]
            seen[added, positions[0, length:]] = False  # the text's token at that position
            mask = torch.zeros(1, 1, width, width, dtype=self.facts.dtype, device=positions.device)
            masks[kind] = mask.masked_fill_(~seen, torch.finfo(self.facts.dtype).min)
        return masks
