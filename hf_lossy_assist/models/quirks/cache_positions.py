"""Models whose forward takes no `position_ids` and counts positions from the cache's length (BART's decoder and its kin): in a batch each
row's tokens get those of their own row.

Such a decoder asks a table of positions for `cache_length … cache_length + Q − 1`; of rows of different length a cache has only one length. Here the
table is asked for the columns at which each row's tokens stand, which is what `generate` counts, padding and holes included.


Where the tokens of rows stand, for decoders whose forward is not told: they count on from the cache's length, one for all rows.

Two places in such a decoder know it: a table of positions (BART, Marian, M2M100, Speech2Text) and a bias by distance (T5 and its like).
Within `standing` they have each row's own. The table's entries and the bias are the module's, asked for as it asks for them itself.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..compat import CACHE, CACHE_NAMES, takes_positions
from ..introspection import base_of
from .patching import ScopedPatch


LENGTH = {f"{name}_length" for name in CACHE_NAMES}
_tables: WeakKeyDictionary[Any, list[torch.nn.Module]] = WeakKeyDictionary()
_places: ContextVar[torch.Tensor | None] = ContextVar("places", default=None)


def tables_of(base: Any) -> list[torch.nn.Module]:
    """The tables of positions that a model which takes none asks by the cache's length."""
    if base not in _tables:
        found = [] if takes_positions(base) else [part for part in base.modules() if _counts_cache(part)]
        _tables[base] = found
    return _tables[base]


def _counts_cache(part: torch.nn.Module) -> bool:
    names = set(inspect.signature(part.forward).parameters)
    return isinstance(part, torch.nn.Embedding) and bool(names & LENGTH) and "position_ids" in names


def with_places(model: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """`model`, or for one that has such tables a callable like it that also takes `position_ids` (1 or B, Q)."""
    tables = tables_of(base)
    return partial(_run, model, tables) if tables else model


def _run(model: Callable[..., Any], tables: Sequence[torch.nn.Module], position_ids: torch.Tensor, **inputs: Any) -> Any:  # fmt: skip
    token = _places.set(position_ids)
    try:
        with _asked.within(tables):
            return model(**inputs)
    finally:
        _places.reset(token)


def _asking_table(table: torch.nn.Module) -> dict[str, Any]:
    return {"forward": partial(_forward, table.forward)}


_asked = ScopedPatch(_asking_table)


def _forward(own: Callable[..., Any], shape: Any, *args: Any, **kwargs: Any) -> Any:
    places = _places.get()
    if places is None:  # another thread's
        return own(shape, *args, **kwargs)
    found = own(shape, 0, position_ids=places.flatten())  # some put a row before them
    return found.view(*places.shape, found.shape[-1])


BEFORE = f"{CACHE}_length"  # what a table's forward calls the tokens before its own
TABLE, BIAS = "embed_positions", "compute_bias"


@dataclass(frozen=True)
class Seams:
    """Of one decoder."""

    told: str | None  # by which name its forward takes positions; then it needs nothing else
    tables: tuple[Any, ...]
    biases: tuple[Any, ...]

    @classmethod
    def of(cls, model: Any) -> "Seams":
        """Of an encoder-decoder, or of a decoder that reads an encoder's output."""
        base = base_of(model)
        told = _told(base)
        if told is not None:
            return cls(told, (), ())
        decoder = base.get_decoder()
        tables = [its for key, its in decoder.named_modules() if key.rpartition(".")[2] == TABLE and _counts(its)]
        biases = [its for its in decoder.modules() if getattr(its, "has_relative_attention_bias", False)]
        return cls(None, tuple(tables), tuple(its for its in biases if _takes(getattr(its, BIAS, None))))

    @property
    def known(self) -> bool:
        """Whether anything says where tokens stand."""
        return self.told is not None or bool(self.tables or self.biases)

    @property
    def reads_tokens(self) -> bool:
        """Whether a token's place depends on which it is: sinusoids that give padding none, and count a block's tokens without it."""
        return any(_padding_of(table) is not None for table in self.tables)


def _told(base: Any) -> str | None:
    names = inspect.signature(base.forward).parameters
    if not base.config.is_encoder_decoder:  # Whisper's decoder alone hands on what it does not know
        return "position_ids"
    if "decoder_position_ids" in names:
        return "decoder_position_ids"
    # `EncoderDecoderModel` hands everything that begins with "decoder_" on to its decoder.
    composite = base.config.model_type == "encoder-decoder" and hasattr(base, "decoder")
    inner = inspect.signature(base.decoder.forward).parameters if composite else {}
    return "decoder_position_ids" if "position_ids" in inner else None


def _counts(table: Any) -> bool:
    return BEFORE in inspect.signature(table.forward).parameters


def _takes(method: Any) -> bool:
    return method is not None and "past_seen_tokens" in inspect.signature(method).parameters


def _padding_of(table: Any) -> int | None:
    """The token that a table gives no position, or None where it does not look at tokens: an `Embedding` is asked by number."""
    return None if isinstance(table, torch.nn.Embedding) else getattr(table, "padding_idx", None)


class Standing:
    """Where the tokens of one forward stand."""

    def __init__(self, positions: torch.Tensor, reach: int, rows: dict[int, torch.Tensor]):
        """`positions` (1 or B, Q) int64, all below `reach`. `rows`: what was asked of a table before, by its `id`, (≥ reach, D)."""
        self.positions, self.reach, self.rows = positions, reach, rows

    def look_up(self, table: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """What `table` gives for these positions, (1 or B, Q, D); `args` and `kwargs`: its forward's."""
        given = inspect.signature(table.forward).bind(*args, **kwargs).arguments
        entries = self.rows.get(id(table))
        if entries is None or len(entries) < self.reach:
            entries = self.rows[id(table)] = _entries(table, given, self.reach)
        found, padding = entries[self.positions], _padding_of(table)
        if padding is not None:
            ids = next(value for value in given.values() if isinstance(value, torch.Tensor) and value.dim() == 2)
            nothing = _entries(table, given, 1, padding)
            found = torch.where((ids == padding)[..., None], nothing[0], found)
        return found

    def bias(self, compute: Callable[..., torch.Tensor], width: int, device: Any) -> torch.Tensor:
        """What a method `compute_bias` gives for these positions over `width` slots, (1 or B, heads, Q, width)."""
        by_distance = compute(1, width, device=device, past_seen_tokens=width - 1)[0, :, 0].flip(-1)  # (heads, width)
        slots = torch.arange(width, device=self.positions.device)
        distance = (self.positions[..., None] - slots).clamp(min=0)  # the mask hides what lies behind a token
        return by_distance[:, distance].transpose(0, 1)


def _entries(table: Any, given: dict[str, Any], length: int, token: int | None = None) -> torch.Tensor:
    """A table's first `length` entries, (length, D), as for a text of `token`, by default of one that is no padding."""
    if token is None:
        token = int(_padding_of(table) == 0)
    asked: dict[str, Any] = {}
    for name, value in given.items():
        if name == BEFORE:
            asked[name] = 0
        elif name == "position_ids":
            asked[name] = None if value is None else _counted(length, value)
        elif isinstance(value, torch.Tensor):
            asked[name] = value.new_full((1, length, *value.shape[2:]), token)
        elif isinstance(value, tuple):  # a shape
            asked[name] = torch.Size((1, length))
    out: torch.Tensor = table.forward(**asked)
    return out.reshape(length, -1)


def _counted(length: int, like: torch.Tensor) -> torch.Tensor:
    """0 … length − 1, one behind the other as the positions in `like` are: (Q,), (1, Q) or Pegasus-X's (Q, 1)."""
    places = torch.arange(length, device=like.device)
    if like.dim() == 1:
        return places
    return places[:, None] if like.shape[-1] == 1 else places[None]


_standing: ContextVar[Standing | None] = ContextVar("standing", default=None)


@contextmanager
def standing(seams: Seams, where: Standing) -> Iterator[None]:
    """A forward of this thread here has its tokens where `where` says. The modules belong to all threads: others' forwards see nothing."""
    token = _standing.set(where)
    with (
        ExitStack() as stack
    ):  # around all that is to be undone: a stop from the keyboard may come between any two lines
        stack.callback(_standing.reset, token)
        for table in seams.tables:
            handle = table.register_forward_hook(_of_rows(where), with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(_biased.within(seams.biases))
        yield


def _of_rows(where: Standing) -> Any:
    def look_up(table: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> torch.Tensor | None:
        return where.look_up(table, args, kwargs) if _standing.get() is where else None

    return look_up


def _asking(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def compute_bias(query_length: int, key_length: int, device: Any = None, **others: Any) -> torch.Tensor:
        where = _standing.get()
        if where is None:  # another thread's
            return compute(query_length, key_length, device=device, **others)
        return where.bias(compute, key_length, device)

    return compute_bias


def _with_bias(attention: Any) -> dict[str, Any]:
    return {BIAS: _asking(getattr(attention, BIAS))}


_biased = ScopedPatch(_with_bias)
