"""The hidden states of mined mismatches: what AutoJudge's head reads (Garipov et al., §3.2, huggingface.co/papers/2504.20039).

One forward per problem and model covers the whole text and every alternative token, as verification sees a block: all
positions in parallel. So the target's states are those of decoding to the last bit that kernels allow. The draft's come token by token when decoding,
which in half precision is not quite the same (the paper's Appendix C): there a head on the target alone is the safe choice. A model with a recurrent
state reads each alternative token in a forward of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.utils import tqdm

from ...artifacts.features import FeatureSpec, FeatureTap
from ...artifacts.json_io import read_object
from ...models.recurrent.layers import keeps_states
from ...training.finished import check_files
from ...validation import MOST, shown
from .at_once import AtOnce
from .mined import RECORD, why_nothing
from .reading import states_along, why_not_searched


COLUMNS = ("problem", "position", "target_token", "draft_token", "important")
IDS, TOKENS = ("prompt_ids", "response_ids"), ("target_token", "draft_token")  # the columns that hold token ids
PLACES = ("predicting", "token", "target_token")  # before the mismatch, at the draft's token, at the target's


@dataclass(frozen=True)
class MinedTable:
    """A mined dataset as tensors, N mismatches in order."""

    problem: torch.Tensor  # (N,) int64
    position: torch.Tensor  # (N,) int64   index into the problem's response
    target_token: torch.Tensor  # (N,) int64
    draft_token: torch.Tensor  # (N,) int64
    important: torch.Tensor  # (N,) bool
    texts: dict[int, tuple[list[int], list[int]]]  # of each problem: the prompt's tokens, the response's
    facts: dict[str, Any]  # mine.json

    def by_problem(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each problem with the numbers of its rows (n,) int64."""
        order = self.problem.argsort(stable=True)
        names, counts = self.problem[order].unique_consecutive(return_counts=True)
        yield from zip(names.tolist(), order.split(counts.tolist()), strict=True)

    def check_tokens(self, vocabulary: int, where: str) -> None:
        """Refuse token ids that are not from 0 to `vocabulary` - 1. `where`: the dataset's name. Raises: `ValueError`, one line."""
        found = [
            (name, [problem] * len(ids), ids)
            for problem, texts in self.texts.items()
            for name, ids in zip(IDS, texts, strict=True)
        ]
        found += [(name, self.problem.tolist(), getattr(self, name).tolist()) for name in TOKENS]
        for name, problems, ids in found:
            for problem, token in zip(problems, ids, strict=True):
                if token is None or not 0 <= token < vocabulary:
                    raise ValueError(
                        f"{where}: {name} of problem {problem} has the token id {shown(token)}, expected 0 to {vocabulary - 1}: mine it again"
                    )

    def __len__(self) -> int:
        return len(self.problem)


def read_mined(path: str | Path) -> MinedTable:
    """The dataset that `hf-lossy mine` wrote.

    Raises: `ValueError`, one line, where the folder is another thing, unfinished, without mismatches or inconsistent.
    """
    from datasets import load_from_disk

    path = Path(path)
    if not (path / RECORD).is_file():
        part = Path(f"{path}.partial")
        hint = f" ({part} is unfinished: hf-lossy mine --resume)" if part.is_dir() else ""
        raise ValueError(f"{path} is no dataset of hf-lossy mine: no {RECORD} in it{hint}")
    facts = read_object(path / RECORD, "an object, the record of a run of hf-lossy mine")
    check_files(path, facts)
    try:
        data = load_from_disk(str(path))
    except IndexError:  # how `datasets` reads what it saved without a single row
        data = []
    except Exception as error:  # `datasets` raises whatever its reader meets in a damaged file
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{path} cannot be read ({said}): mine it again") from None
    if len(data) == 0:
        raise ValueError(f"{path} has no mismatch: {why_nothing(facts)}")
    missing = [name for name in (*COLUMNS, *IDS) if name not in data.column_names]
    if missing:
        raise ValueError(f"{path} is no dataset of hf-lossy mine: it has no column {', '.join(missing)}")
    given = data.select_columns(list(COLUMNS)).with_format("numpy")
    column = {name: torch.from_numpy(np.asarray(given[name][:])) for name in COLUMNS}
    names, firsts = np.unique(column["problem"].numpy(), return_index=True)
    rows = data.select_columns(list(IDS)).select(firsts)
    mined = MinedTable(
        **{name: column[name].long() for name in COLUMNS[:-1]},
        important=column["important"].bool(),
        texts={int(n): (row["prompt_ids"], row["response_ids"]) for n, row in zip(names, rows, strict=True)},
        facts=facts,
    )
    _check(mined, path)
    return mined


def _check(mined: MinedTable, path: Path) -> None:
    """Every token id may be one, and every mismatch stands where it says."""
    mined.check_tokens(MOST, str(path))
    rows = zip(*(getattr(mined, name).tolist() for name in COLUMNS[:-1]), strict=True)
    for number, (problem, t, *tokens) in enumerate(rows):
        prompt, response = mined.texts[problem]
        if not prompt or not 0 <= t < len(response) or response[t] not in tokens:
            raise ValueError(
                f"{path}: row {number} says that tokens {tokens[0]} and {tokens[1]} differ at position {t} of problem {problem}, "
                "whose response holds neither there: mine it again"
            )


@torch.no_grad()
def hidden_states(
    model: Any, mined: MinedTable, places: Sequence[str] = PLACES, name: str = "model"
) -> dict[str, torch.Tensor]:
    """The last hidden states (after the final norm) of every mismatch, in its rows' order.

    Args:
        model: a loaded decoder-only model that runs on rows of different length, in evaluation mode.
        places: of `PLACES`; what is not needed is not computed.
        name: the model's role, for the progress bar and errors.

    Returns: for each place (N, H) float32 on the CPU. "predicting" is the state at position t − 1, whose logits the tokens
    at t are drawn from; "token" and "target_token" are the states that encode the draft's and the target's token at t.

    Raises: `ValueError` for a model that takes no mask of this kind.
    """
    reason = why_not_searched(model)
    if reason is not None:
        raise ValueError(
            f"hidden states need a model that runs on rows of different length; the {name} does not: {reason}"
        )
    found: dict[str, torch.Tensor] = {}
    with FeatureTap(model, FeatureSpec("target")) as tap:
        at_once = None if keeps_states(model) else AtOnce(model, tap)
        for problem, rows in tqdm(
            mined.by_problem(), desc=f"states of the {name}", total=len(mined.texts), unit="problem"
        ):
            text, others, columns = _layout(mined, problem, rows, places)
            if at_once is None:
                states, skipped = states_along(model, tap, len(mined.texts[problem][0]), text, others), 0
            else:
                states, skipped = at_once(text, others, min(map(min, columns.values())))
            for place, wanted in columns.items():
                taken = states[[column - skipped for column in wanted]].float().cpu()
                if place not in found:
                    found[place] = taken.new_empty(len(mined), taken.shape[1])
                found[place][rows] = taken
    return found


def _layout(
    mined: MinedTable, problem: int, rows: torch.Tensor, places: Sequence[str]
) -> tuple[list[int], list[tuple[int, int]], dict[str, list[int]]]:
    """The text up to the last mismatch, the (token, position) that come behind it, and of each place the columns to read.

    A token that the text itself holds is read there; each other one is appended.
    """
    prompt, response = mined.texts[problem]
    positions = mined.position[rows].tolist()
    text = prompt + response[: max(positions) + 1]
    others: list[tuple[int, int]] = []
    columns: dict[str, list[int]] = {}
    for place in places:
        if place == "predicting":
            columns[place] = [len(prompt) + t - 1 for t in positions]
            continue
        columns[place] = []
        chosen = mined.draft_token if place == "token" else mined.target_token
        for t, token in zip(positions, chosen[rows].tolist(), strict=True):
            inside = response[t] == token
            columns[place].append(len(prompt) + t if inside else len(text) + len(others))
            if not inside:
                others.append((token, len(prompt) + t))
    return text, others, columns
