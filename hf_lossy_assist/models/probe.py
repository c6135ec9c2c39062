"""Probe whether a model's logits for blocks, partly rolled back, equal those for single tokens.

Decided from its config and code where possible, else tried once for each model object on a few tokens. Some models
derive position biases from the attention mask, let the tokens of a block attend to each other, or round a top-k by the
visible length; they would silently go wrong.
"""

import sys
from collections.abc import Callable, Sequence

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.utils import ModelOutput

from .cached_model import ModelInputs
from .facts import CACHE, configured_rope, facts_of, forward_of
from .introspection import (
    NotTried,
    base_of,
    cached_per_model,
    device_of,
    has_fixed_rows,
    is_tested,
    recall,
    remember,
    takes_masks,
    tokens_known,
)
from .row_model import RowModel


# Errors that a model may raise at inputs it does not support: a 4-D mask, a block after a cache, a position.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)
EXACT = (torch.float32, torch.float64)
COARSE, COARSEST = 0.02, 0.1  # tolerance in half precision, relative to the largest logit; a wrong state exceeds it
REACH = 64  # the longest window, chunk or top-k that the text of a probe exceeds
BLOCK = 3  # tokens
DIFFERS = "did not give what it gives one token at a time"
ROWS, UNTRIED = "rows of different length", "untried"
BLOCK_SPARSE = "block_sparse"  # BigBird's attention


def probed(base: PreTrainedModel, name: object, what: str, attempt: Callable[[], str | None]) -> str | None:
    """Return the result of `attempt`, or its failure in one line; run it once for each model object and `name`."""
    if recall(base, name, UNTRIED) == UNTRIED and has_fixed_rows(base):
        return NotTried(f"with an adapter for each row it cannot be tried on {what}: call once without adapter_names")
    return remember(base, name, lambda: probe_failure(base, what, attempt))


@torch.no_grad()
def probe_failure(base: PreTrainedModel, what: str, attempt: Callable[[], str | None]) -> str | None:
    """Return the result of `attempt`, or its failure in one line. Dropout is off meanwhile."""
    training = [module for module in base.modules() if module.training]
    for module in training:
        module.training = False
    try:
        return attempt()
    except FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise  # not caused by the model, and the result would be cached
        return f"a trial on {what} failed ({' '.join(str(error).split())[:160] or type(error).__name__})"
    finally:
        for module in training:
            module.training = True


@cached_per_model
def why_not_rows(base: PreTrainedModel) -> str | None:
    """Return why this model cannot run on a `RowCache`; None if it can."""
    config = base.config.get_text_config(decoder=True)
    if base.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    facts = facts_of(base)
    if facts.layers is None:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
        return f"it keeps {', '.join(sorted(kind.__name__ for kind in kinds))} in its cache"
    if facts.windows and not takes_masks(facts.attention):
        return f"its attention implementation is {facts.attention!r} (load it with attn_implementation='sdpa')"
    if facts.is_tested:
        return None
    reason = _why_not_structure(base)
    if reason is not None:
        return reason
    attempt = _try_states if facts.keeps_states else _try_rows
    return probed(base, "rows", ROWS, lambda: attempt(base))


def _why_not_structure(base: PreTrainedModel) -> str | None:
    """Return what in a model's config or modules excludes rows that a trial in half precision might let through."""
    if any(buffer.dim() == 4 for buffer in base.buffers()):
        return "it cuts a causal mask of its own from the sizes of q and k, as if all rows were of one length"
    if getattr(base.config, "attention_type", None) == BLOCK_SPARSE:
        return f"it chooses what it attends to by the prompt's length ({BLOCK_SPARSE})"
    if facts_of(base).position_table is not None and facts_of(base).position_argument is None:  # BART's kin, RoFormer
        return "its forward takes no position_ids, and its table of positions is read by the length of the cache"
    if any(hasattr(module, "rel_logits_proj") for module in base.modules()):  # Inkling
        return "its biases by distance are those of one row"
    return why_not_blocks(base)


def may_read_at_once(model: PreTrainedModel) -> bool:
    """Return whether the probe alone, if anything, excludes rows: it feeds prompts with a block, and their tokens may
    attend to each other."""
    return why_not_rows(model) is None or recall(base_of(model), "rows") is not None


def why_not_prefixes(model: PreTrainedModel) -> str | None:
    """Return why the rows of a `RowCache` of this model cannot be rolled back to a shared prefix; None if they can."""
    if why_not_rows(model) is None and facts_of(model).keeps_states:
        return "it keeps a recurrent state, which cannot go back to the beginning that several texts share"
    return why_not_rows(model)


def why_not_assisted(model: PreTrainedModel) -> str | None:
    """Return why Transformers' assisted loop writes another text than its plain one with this model;
    None if it does not."""
    base = base_of(model)
    return (
        None if is_tested(base) else probed(base, "assisted", "a block that is rolled back", lambda: _try_block(base))
    )


def keeps_states_alone(cache: Cache) -> bool:
    """Return whether no layer of a cache has keys and values, as in Mamba; such a cache does not count tokens."""
    linear = getattr(cache, "is_linear", [])
    return bool(linear) and all(linear)


# -- lengths of texts --------------------------------------------------------------------------------------------------


@cached_per_model
def why_not_blocks(base: PreTrainedModel) -> str | None:
    """Return why a target's blocks differ from single tokens in any loop, beyond some length; None if they do not.

    Decided from config and modules: a probe on a few tokens would not reach it.
    """
    config = base.config.get_text_config(decoder=True)
    kind, window = configured_rope(config), getattr(config, "sliding_window", None)
    if kind is not None and facts_of(base).rope is None:
        return f"it computes {kind!r} RoPE, which changes with the text's length, in code of its own"
    view = getattr(config, "keep_window_size", None)
    if view is not None:  # Doge: a repeated token ties with itself, and `topk` breaks ties by the width of its input
        return f"it keeps {view} tokens in view by a top-k whose ties a block breaks otherwise"
    if base.config.is_encoder_decoder or window is None or getattr(config, "layer_types", None):
        return None
    # Moshi: `DynamicCache` drops what left the window, but the model's mask has no window.
    code = vars(sys.modules[type(base.get_decoder()).__module__])
    if [maker for maker in code if maker.startswith("create_") and "mask" in maker] == ["create_causal_mask"]:
        return f"it has a sliding window of {window} in its cache and none in its attention mask"
    return None


# -- probes ------------------------------------------------------------------------------------------------------------


def texts_to_try(base: PreTrainedModel, rows: int) -> tuple[torch.Tensor, int]:
    """Return token ids (rows, n + BLOCK + 1) for a probe, and the length n of their prompts: longer than a short
    window."""
    config = base.config.get_text_config(decoder=True)
    words = ("window", "chunk", "topk", "block_size", "budget", "local_attention")
    limits = [value for name, value in vars(config).items() if any(word in name for word in words)]
    n = 5 + max([size for size in limits if isinstance(size, int) and 0 < size <= REACH], default=0)
    vocabulary = min(tokens_known(base), 1000)
    first = 5 if vocabulary > 10 else 0  # skip the special tokens of larger vocabularies
    ids = torch.arange(rows * (n + BLOCK + 1), device=device_of(base)).view(rows, -1) * 7
    return first + ids % (vocabulary - first), n


def reference_logits(
    step: Callable[[torch.Tensor, torch.Tensor], ModelOutput], text: torch.Tensor, n: int
) -> torch.Tensor:
    """Return the logits (BLOCK + 1, V) after `text`'s tokens from position n on, as `generate` computes them.

    `step`: runs ids and positions, (1, Q) each, on Transformers' cache, without this package.
    """
    positions = torch.arange(len(text), device=text.device)
    blocks = [slice(0, n), *(slice(i, i + 1) for i in range(n, len(text)))]
    return torch.stack([step(text[None, columns], positions[None, columns]).logits[0, -1] for columns in blocks][1:])


def _one_by_one(base: PreTrainedModel, text: torch.Tensor, n: int) -> torch.Tensor:
    arguments = {CACHE: DynamicCache(config=base.config.get_text_config(decoder=True)), "use_cache": True}
    run = forward_of(base, base)
    return reference_logits(lambda ids, positions: run(input_ids=ids, position_ids=positions, **arguments), text, n)


def same(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, coarse: float = COARSE) -> bool:
    """Return whether logits agree up to rounding in `dtype`;
    `coarse`: tolerance in half precision, relative to the largest logit."""
    tolerance = 1e-4 if dtype in EXACT else coarse
    got, wanted = got.float(), wanted.float()
    return torch.allclose(got, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


def _try_rows(base: PreTrainedModel) -> str | None:
    ids, n = texts_to_try(base, 2)
    wanted = [_one_by_one(base, text, n) for text in ids]
    return why_rows_differ(lambda: RowModel(base, 2, ids.shape[1] + 1), ids, n, wanted)


def why_rows_differ(
    rows: Callable[[], RowModel], ids: torch.Tensor, n: int, wanted: Sequence[torch.Tensor]
) -> str | None:
    """Run rows of one length, a wrong block, rollback, the right block, rows of different lengths; then prompts of
    different lengths.

    `rows`: makes a model with two empty rows; `ids`, `n`: see `texts_to_try`; `wanted`: each text's `reference_logits`.
    """
    runner = rows()
    runner.feed(torch.cat([ids[:, :n], ids.flip(0)[:, -BLOCK:]], dim=1), [n + BLOCK] * 2, keep=BLOCK + 1)
    for what, ends in {"rows of one length": [n, n], ROWS: [n + 1, n]}.items():
        runner.rollback(ends)
        blocks = torch.stack([text[start : start + BLOCK] for text, start in zip(ids, ends, strict=True)])
        got = runner.feed(blocks, [BLOCK] * 2, keep=BLOCK)
        if not same(got, torch.stack([w[h - n :][:BLOCK] for w, h in zip(wanted, ends, strict=True)]), runner.dtype):
            return f"a trial on {what} {DIFFERS}"
    ragged = rows()  # prompts of different lengths have a separate forward
    ragged.feed(ids[:, :n], [n, n - 2], keep=0)
    ragged.feed(torch.stack([ids[0, n : n + 3], ids[1, n - 2 : n + 1]]), [1, 3])
    got = ragged.feed(ids[:, n + 1 : n + 2], [1, 1], keep=1)
    if not same(got, torch.stack([w[1:2] for w in wanted]), runner.dtype):
        return f"a trial on prompts of different length {DIFFERS}"
    return None


def _after(texts: torch.Tensor, starts: torch.Tensor, width: int) -> torch.Tensor:
    """Return the tokens (B, width) of each text (B, n) from position `starts[b]` on; arbitrary ones after its end."""
    positions = starts[:, None] + torch.arange(width, device=texts.device)
    return texts.gather(1, positions.clamp(max=texts.shape[1] - 1))


def _try_states(base: PreTrainedModel) -> str | None:
    """Run rows of equal and of two lengths that keep 0 to `BLOCK` tokens of a block, fed at once or one by one, and
    continue."""
    ids, n = texts_to_try(base, 2)
    which = torch.arange(2 * (BLOCK + 1), device=ids.device) % 2  # which of the texts each row has
    texts, good = ids[which], torch.arange(len(which), device=ids.device) // 2
    forgotten = torch.arange(BLOCK, device=ids.device) >= good[:, None]
    whole = forward_of(base, base)(input_ids=ids, use_cache=False).logits[:, n:]
    for lag in (0, 1):  # how many tokens shorter the second text's prompt is
        wanted = torch.stack([_one_by_one(base, text, n - lag * b)[lag * b :] for b, text in enumerate(ids)])
        # In half precision Mamba-2's steps round more than its scan; a model may differ by three times that.
        coarse = min(max(COARSE, 3 * float((whole - wanted).abs().max() / wanted.abs().max())), COARSEST)
        starts = n - 1 - which * lag  # a prompt's last token comes with the block, as in the engine
        block = torch.where(forgotten, texts[:, :1], _after(texts, starts, BLOCK))
        for what, sizes in {"a block": [BLOCK], "tokens fed one by one": [1] * BLOCK}.items():
            runner = RowModel(base, len(which), ids.shape[1] + 1)
            runner.feed(texts[:, : n - 1], starts.tolist(), keep=0)
            for tokens in block.split(sizes, dim=1):
                runner.feed(tokens, [tokens.shape[1]] * len(which))
            runner.rollback((starts + good).tolist())
            got = runner.feed(_after(texts, starts + good, 2 + lag), (2 + which * lag).tolist())
            if not same(got[torch.arange(len(which)), 1 + which * lag], wanted[which, good], runner.dtype, coarse):
                return f"a trial on {what}, of which rows keep different numbers, {DIFFERS}"
    return None


def _try_block(base: PreTrainedModel) -> str | None:
    """Read a prompt with a wrong block in one forward, roll back, and read the right block;
    return None if its logits equal those of single tokens."""
    ids, n = texts_to_try(base, 1)
    if base.config.is_encoder_decoder and base.main_input_name != "input_ids":
        return None  # an encoder of sounds or images, whose decoder is one of texts
    block, single = (_reader(base, ids) for _ in range(2))
    first = block(torch.cat([ids[:, :n], ids[:, :BLOCK]], dim=1), n + BLOCK)
    if getattr(first, CACHE, None) is None:
        return "it returns no cache"
    first[CACHE].crop(-BLOCK)
    got = block(ids[:, : n + BLOCK], BLOCK).logits[:, -BLOCK:]
    single(ids[:, :n], n)
    wanted = torch.cat([single(ids[:, : i + 1], 1).logits[:, -1:] for i in range(n, n + BLOCK)], dim=1)
    if not same(got, wanted, base.get_input_embeddings().weight.dtype):
        return f"a trial on a block that is rolled back {DIFFERS}"
    return None


def _reader(base: PreTrainedModel, ids: torch.Tensor) -> Callable[[torch.Tensor, int], ModelOutput]:
    """Return a function that reads the last tokens of a text (1, n), as Transformers' loops do, on one cache."""
    cache: Cache = DynamicCache(config=base.config.get_text_config(decoder=True))
    arguments: ModelInputs = {"use_cache": True}
    if base.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache())
        arguments["encoder_outputs"] = base.get_encoder()(input_ids=ids)
    cache.activate_past_recording()

    def read(text: torch.Tensor, new: int) -> ModelOutput:
        width, inputs = text.shape[1], arguments | {CACHE: cache}
        if facts_of(base).position_argument is not None and not base.config.is_encoder_decoder:
            inputs["position_ids"] = torch.arange(width, device=text.device)[None]
        inputs = base.prepare_inputs_for_generation(
            text, next_sequence_length=new, is_first_iteration=new == width, **inputs
        )
        return base(**inputs, return_dict=True)

    return read
