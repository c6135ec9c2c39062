"""The records of held-out texts that lie beside a fitted head, without features: what a plan replays."""

import hashlib
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from ...artifacts.heads import CONFIG, Head
from ...artifacts.hub import AGAIN, fetch
from ...artifacts.reading import read_object, read_whole
from ...training.dataset import KINDS, Table, check_records


HELD_OUT = "heldout.safetensors"  # beside a fitted head: what `replay` needs, without features
DIGEST = "heldout_sha256"  # its entry in the head's config, under `training`
LARGEST = 2**28  # bytes of it
COLUMNS = {"row": torch.int32, "kind": torch.int8, **dict.fromkeys(("v", "p", "q", "distance"), torch.float32)}


def held_out(table: Table, head: Head) -> dict[str, torch.Tensor]:
    """What is kept of (at most 64) test prompts: each record's row, kind, V, p, q and d_TV, in order."""
    table = table.of(torch.isin(table.prompt, table.prompt.unique()[:64]))
    with torch.no_grad():
        v = head(table.features)
    rows = torch.stack([table.prompt, table.kind]).unique(dim=1, return_inverse=True)[1]
    return {
        "row": rows.int(),
        "kind": table.kind.to(torch.int8),
        "v": v,
        "p": table.p.contiguous(),
        "q": table.q.contiguous(),
        "distance": table.distance.contiguous(),
    }


def read_held_out(source: str, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The held-out records beside a head, in a folder or on the Hub: the columns that `held_out` gives.

    Raises: `ValueError`, one line, where they are missing or not those that the head was fitted with (its config has their SHA-256).
    """
    file, config = fetch(source, [HELD_OUT, CONFIG], **kwargs)
    training = read_object(config).get("training")
    digest = training.get(DIGEST) if isinstance(training, dict) else None
    data = read_whole(file, LARGEST)
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(
            f"{file} is not the file that {CONFIG} was saved with (SHA-256 differs): fit the head again, or download it again ({AGAIN})"
        )
    try:
        columns = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}): fit the head again") from None
    found = {name: (column.dtype, column.shape) for name, column in columns.items()}
    shape = columns["row"].shape if "row" in columns else torch.Size()
    if found != {name: (dtype, shape) for name, dtype in COLUMNS.items()} or len(shape) != 1 or not shape[0]:
        raise ValueError(f"{file}: expected the columns {', '.join(COLUMNS)} of one length: fit the head again")
    check_records(columns, KINDS, f"{file}: ")
    if not ((columns["v"] >= 0) & (columns["v"] <= 1)).all():
        raise ValueError(f"{file}: v is not from 0 to 1 everywhere: fit the head again")
    for name in ("draft", "mixed"):
        if not (columns["kind"] == KINDS.index(name)).any():
            raise ValueError(f"{file} holds no texts of the kind {name!r}, which the plan replays: fit the head again")
    return columns
