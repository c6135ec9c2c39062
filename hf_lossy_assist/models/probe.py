"""How a model is tried, whatever it is tried on.

What a model gives one token at a time, as `generate` comes by it, without this package: the measure of a trial.

Whether a model gives in blocks, some of them rolled back, what it gives one token at a time: read off its config and code
where that can be, else tried once for each model object, on a few tokens.

Some models build position biases from the attention mask, let the tokens of a block see each other, or round a top-k by the
length of what they see; they would go wrong without a word.


Whether an encoder-decoder's rows of different length give what each gives one token at a time: tried once for each model object.

Targets whose text depends on its length in ways that blocks of tokens cannot follow, told from their config and modules: a
trial on a few tokens would not reach these lengths."""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

from .architecture import Architecture
from .cached_model import CroppingModel
from .compat import CACHE, forward_of, takes_positions
from .introspection import attention_of, base_of, device_of, has_fixed_rows, is_tested, tokens_known
from .quirks.rope import changing_kind, configured_kind
from .recurrent.layers import keeps_states
from .row_model import RowModel


# What a model may raise at inputs that it does not take: a 4-D mask, a block behind a cache, a position.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)


@torch.no_grad()
def probe_failure(base: Any, what: str, attempt: Callable[[], str | None]) -> str | None:
    """The reason that `attempt` returns, or what it fails with, in one line. Dropout is off meanwhile."""
    training = [module for module in base.modules() if module.training]
    for module in training:
        module.training = False
    try:
        return attempt()
    except FAILURES as error:
        said = " ".join(str(error).split())[:160] or type(error).__name__
        return f"a trial on {what} failed ({said})"
    finally:
        for module in training:
            module.training = True


EXACT = (torch.float32, torch.float64)
COARSE = 0.1  # of the largest logit: a wrong state is further off, however coarse a model's numbers are


def behind(texts: torch.Tensor, starts: torch.Tensor, width: int) -> torch.Tensor:
    """Of each text, (B, n), the tokens from place `starts[b]` on, (B, width); any where it has ended."""
    places = starts[:, None] + torch.arange(width, device=texts.device)
    return texts.gather(1, places.clamp(max=texts.shape[1] - 1))


def one_by_one(base: Any, text: torch.Tensor, n: int) -> torch.Tensor:
    """The logits behind `text`'s tokens from place n on, (BLOCK + 1, V), as `generate` comes by them, without this package."""
    cache = DynamicCache(config=base.config.get_text_config(decoder=True))
    places, out = torch.arange(len(text), device=text.device), []
    for part in [slice(0, n), *(slice(i, i + 1) for i in range(n, len(text)))]:
        ids, positions = text[None, part], places[None, part]
        run = forward_of(base, base)
        out.append(run(input_ids=ids, position_ids=positions, **{CACHE: cache}, use_cache=True).logits[0, -1])
    return torch.stack(out[1:])


def rounding(base: Any, texts: torch.Tensor, n: int, wanted: list[torch.Tensor]) -> float:
    """How far a model in half precision is from itself, of its largest logit: read in one forward, and one token at a time.

    Mamba-2's steps round more than its scan does. `wanted`: what `one_by_one` gives of each text from place n on.
    """
    if base.dtype in EXACT:
        return 0.0
    run, off = forward_of(base, base), 0.0
    for text, its in zip(texts, wanted, strict=True):
        whole = run(input_ids=text[None], use_cache=False).logits[0, n:].float()
        off = max(off, float((whole[: len(its)] - its.float()).abs().max() / its.float().abs().max()))
    return off


def same(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, own: float = 0.0) -> bool:
    """Whether these logits are alike to what rounding does in `dtype`; `own`: as `rounding` says of the model."""
    tolerance = 1e-4 if dtype in EXACT else min(max(0.02, 3 * own), COARSE)
    got, wanted = got.float(), wanted.float()
    return torch.allclose(got, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


REACH = 64  # the longest window, chunk or top-k that a trial's text goes beyond
BLOCK = 3  # tokens
RECURRENT = "it keeps a recurrent state, which cannot be rolled back"
_in_rows: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
_alone: WeakKeyDictionary[Any, dict[bool, str | None]] = WeakKeyDictionary()


def why_not_rows(model: PreTrainedModel) -> str | None:
    """Why this model cannot run on a `RowCache`, or None if it can."""
    base = base_of(model)
    config = base.config.get_text_config(decoder=True)
    if base.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    facts = Architecture.of(base)
    if facts.layers is None:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
        return f"it keeps {', '.join(sorted(kind.__name__ for kind in kinds))} in its cache"
    if facts.windows and attention_of(config) not in ("sdpa", "eager"):
        return f"its attention implementation is {attention_of(config)!r} (load it with attn_implementation='sdpa')"
    if not is_tested(base):
        # GPT-Neo, say, whose local window of 256 no short trial would reach.
        if any(buffer.dim() == 4 for buffer in base.buffers()):
            return "it cuts a causal mask of its own from the sizes of q and k, as if all rows were of one length"
        if base not in _in_rows and has_fixed_rows(base):
            return "it has an adapter for each row, and so cannot be tried on rows of different length: call it once without adapter_names"
        if base not in _in_rows:
            attempt = _try_states if facts.keeps_states else _try_rows
            reason = probe_failure(base, "rows of different length", lambda: attempt(base))
            if reason is not None and facts.windows and not takes_positions(base):  # it counts them its own way
                reason = "its forward takes no position_ids"
            _in_rows[base] = reason
        return _in_rows[base]
    return None


def may_read_at_once(model: PreTrainedModel) -> bool:
    """Whether nothing but the trial, whose prompts come with a block behind them, speaks against rows: the tokens of a prompt may see each other."""
    return why_not_rows(model) is None or _in_rows.get(base_of(model)) is not None


def why_not_prefixes(model: PreTrainedModel) -> str | None:
    """Why texts on a `RowCache` of this model cannot go back to a beginning that they share, or None if they can."""
    if why_not_rows(model) is None and keeps_states(model):
        return "it keeps a recurrent state, which cannot go back to the beginning that several texts share"
    return why_not_rows(model)


def why_not_alone(model: PreTrainedModel, model_kwargs: dict[str, Any], guesses: bool = False) -> str | None:
    """Why one row of this model cannot be decoded on the cache that Transformers gives it, or None if it can.

    `model_kwargs` as `generate` prepared them: an encoder-decoder is tried with the first row's encoder output. `guesses`: it is a draft, which
    may read a prompt's last token apart even where the others would have seen it.
    """
    base = base_of(model)
    if is_tested(base):
        return None
    if not crops(model_kwargs.get(CACHE)):
        kinds = getattr(base.config.get_text_config(decoder=True), "layer_types", None) or []
        if getattr(base, "_is_stateful", False) or "linear_attention" in kinds:
            return RECURRENT
        return "it takes no cache of Transformers' kind, which could be rolled back"
    # Else the prompt comes in two forwards, its last token with the first block.
    begun = guesses or int(model_kwargs[CACHE].get_seq_length()) > 0
    tried = _alone.setdefault(base, {})
    if begun not in tried and has_fixed_rows(base):
        return "it has an adapter for each row, and so cannot be tried on one: call it once without adapter_names"
    if begun not in tried:
        tried[begun] = probe_failure(
            base, "a block that is rolled back", lambda: _try_alone(base, model_kwargs, begun)
        )
    return tried[begun]


def refuse_length(model: PreTrainedModel, longest: int) -> None:
    """Refuse a text of up to `longest` tokens where the model keeps fewer in view by a top-k: a token that the text repeats ties
    with itself, and which of the two goes is left to `torch.topk`, by the width of what it is given (Doge)."""
    base = base_of(model)
    kept = _kept_in_view(base)
    if kept is not None and longest > kept:
        raise ValueError(
            f"{type(base).__name__} keeps {kept} tokens in view by a top-k whose ties a block breaks otherwise, and this text may "
            f"come to {longest}: ask for fewer tokens, or leave lossy_policy out"
        )


def _kept_in_view(base: Any) -> int | None:
    return getattr(base.config.get_text_config(decoder=True), "keep_window_size", None)


def keeps_states_alone(cache: Any) -> bool:
    """Whether no layer of a cache has keys and values, as Mamba's: it counts no tokens."""
    linear: list[bool] = getattr(cache, "is_linear", [])
    return bool(linear) and all(linear)


def crops(cache: Any) -> bool:
    """Whether a cache has layers, all of which can forget their last tokens or say that they cannot."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    return layers is not None and not keeps_states_alone(cache) and all(hasattr(layer, "crop") for layer in layers)


def texts_to_try(base: Any, rows: int) -> tuple[torch.Tensor, int]:
    """Token ids (rows, n + BLOCK + 1) to try and n, the length of their prompts: longer than a short window."""
    config = base.config.get_text_config(decoder=True)
    sizes = [value for name, value in vars(config).items() if _limits_sight(name) and isinstance(value, int)]
    n = 5 + max([size for size in sizes if 0 < size <= REACH], default=0)
    kept = _kept_in_view(base)
    if kept is not None:  # longer texts are refused
        n = min(n, max(3, kept - BLOCK - 2))
    known = min(tokens_known(base), 1000)
    first = 5 if known > 10 else 0  # beyond what is special, in vocabularies that have more
    ids = torch.arange(rows * (n + BLOCK + 1), device=device_of(base)).view(rows, -1) * 7
    return first + ids % (known - first), n


def _limits_sight(name: str) -> bool:
    return any(word in name for word in ("window", "chunk", "topk", "block_size", "budget", "local_attention"))


def _try_rows(base: PreTrainedModel) -> str | None:
    ids, n = texts_to_try(base, 2)
    wanted = [one_by_one(base, text, n) for text in ids]
    return why_rows_differ(lambda: RowModel(base, 2, ids.shape[1] + 1), ids, n, wanted)


def why_rows_differ(
    rows: Callable[[], RowModel], ids: torch.Tensor, n: int, wanted: Sequence[torch.Tensor]
) -> str | None:
    """Rows of one length, a wrong block, rollback, the right block, rows of different length; then prompts of different length.

    `rows`: two that hold nothing, `ids` and `n` as of `texts_to_try`, `wanted`: each text's logits from place n on, (BLOCK + 1, V).
    """
    runner = rows()
    runner.feed(torch.cat([ids[:, :n], ids.flip(0)[:, -BLOCK:]], dim=1), [n + BLOCK] * 2, keep=BLOCK + 1)
    for what, held in {"rows of one length": [n, n], "rows of different length": [n + 1, n]}.items():
        runner.rollback(held)
        blocks = torch.stack([text[start : start + BLOCK] for text, start in zip(ids, held, strict=True)])
        got = runner.feed(blocks, [BLOCK] * 2, keep=BLOCK)
        if not same(got, torch.stack([w[h - n :][:BLOCK] for w, h in zip(wanted, held, strict=True)]), runner.dtype):
            return f"a trial on {what} did not give what it gives one token at a time"
    ragged = rows()  # prompts of different length have a forward of their own
    ragged.feed(ids[:, :n], [n, n - 2], keep=0)
    ragged.feed(torch.stack([ids[0, n : n + 3], ids[1, n - 2 : n + 1]]), [1, 3])
    got = ragged.feed(ids[:, n + 1 : n + 2], [1, 1], keep=1)
    if not same(got, torch.stack([w[1:2] for w in wanted]), runner.dtype):
        return "a trial on prompts of different length did not give what it gives one token at a time"
    return None


def _try_states(base: PreTrainedModel) -> str | None:
    """Rows of one length and of two that keep each number of a block's tokens, fed at once or one by one, and go on."""
    ids, n = texts_to_try(base, 2)
    which = torch.arange(2 * (BLOCK + 1), device=ids.device) % 2  # of the texts is a row's
    texts, kept = ids[which], torch.arange(len(which), device=ids.device) // 2
    forgotten = torch.arange(BLOCK, device=ids.device) >= kept[:, None]
    for lag in (0, 1):  # so many tokens the second text's prompt is shorter
        wanted = [one_by_one(base, text, n - lag * number)[lag * number :] for number, text in enumerate(ids)]
        own = rounding(base, ids, n, wanted)
        rights = torch.stack([wanted[a][number] for a, number in zip(which.tolist(), kept.tolist(), strict=True)])
        starts = n - 1 - which * lag  # a prompt's last token comes with the block, as it does in the engine
        block = torch.where(forgotten, texts[:, :1], behind(texts, starts, BLOCK))
        for what, parts in {"a block": [BLOCK], "tokens fed one by one": [1] * BLOCK}.items():
            runner = RowModel(base, len(which), ids.shape[1] + 1)
            runner.feed(texts[:, : n - 1], starts.tolist(), keep=0)
            for part in block.split(parts, dim=1):
                runner.feed(part, [part.shape[1]] * len(which))
            runner.rollback((starts + kept).tolist())
            got = runner.feed(behind(texts, starts + kept, 2 + lag), (2 + which * lag).tolist())
            if not same(got[torch.arange(len(which)), 1 + which * lag], rights, runner.dtype, own):
                return f"a trial on {what}, of which rows keep different numbers, did not give what it gives one token at a time"
    return None


def _try_alone(base: PreTrainedModel, model_kwargs: dict[str, Any], begun: bool) -> str | None:
    """A prompt, at once where it was `begun`, a wrong block, rollback, the right block; None if the logits are those of one token at a time."""
    ids, n = texts_to_try(base, 1)
    plain, runner = (_alone_on(base, model_kwargs, ids[:, :n]) for _ in range(2))
    read = n if begun else n - 1
    runner.feed(ids[:, :read], [read], keep=0)
    if not all(getattr(layer, "is_croppable", True) for layer in getattr(runner.cache, "layers", [])):
        return RECURRENT
    runner.feed(torch.cat([ids[:, read:n], ids[:, :BLOCK]], dim=1), [n - read + BLOCK])
    runner.rollback([n])
    got = runner.feed(ids[:, n : n + BLOCK], [BLOCK])
    plain.feed(ids[:, :n], [n], keep=0)
    wanted = torch.cat([plain.feed(ids[:, i : i + 1], [1]) for i in range(n, n + BLOCK)], dim=1)
    if not same(got, wanted, base.get_input_embeddings().weight.dtype):
        return "a trial on a block that is rolled back did not give what it gives one token at a time"
    return None


def _alone_on(base: Any, model_kwargs: dict[str, Any], prompt: torch.Tensor) -> CroppingModel:
    """The first row's model as `generate` would prepare it for `prompt` (1, n), with an empty cache."""
    cache: Cache = DynamicCache(config=base.config.get_text_config(decoder=True))
    own: dict[str, Any] = {CACHE: cache, "use_cache": True}
    if base.config.is_encoder_decoder:
        own[CACHE] = EncoderDecoderCache(cache, DynamicCache())
        if model_kwargs.get("attention_mask") is not None:
            own["attention_mask"] = model_kwargs["attention_mask"][:1]
        encoded = model_kwargs["encoder_outputs"]
        first = {name: value[:1] for name, value in encoded.items() if isinstance(value, torch.Tensor)}
        own["encoder_outputs"] = type(encoded)(**first)
    elif "position_ids" in inspect.signature(base.forward).parameters:
        own["position_ids"] = torch.arange(prompt.shape[1], device=prompt.device)[None]
    return CroppingModel(base, own, prompt)


def refuse_by_length(model: Any) -> None:
    """Raise `ValueError`, one line, for a target that `generate` alone would make write another text beyond some length."""
    base = base_of(model)
    name, config = type(base).__name__, base.config.get_text_config(decoder=True)
    kind = configured_kind(config)
    if kind is not None and not any(changing_kind(module) for module in base.modules()):
        raise ValueError(
            f"{name} computes {kind!r} RoPE, which changes with the text's length, in code of its own: leave lossy_policy out"
        )
    if base.config.is_encoder_decoder:
        return
    sparse = getattr(base.config, "attention_type", None) == "block_sparse"
    if sparse and any(getattr(module, "attention_type", None) == "block_sparse" for module in base.modules()):
        raise ValueError(
            f"{name} chooses what it attends to by the prompt's length (block_sparse): load it with "
            "attention_type='original_full', or leave lossy_policy out"
        )
    if _slides_in_its_cache_alone(base, config):
        raise ValueError(
            f"{name} has a sliding window of {config.sliding_window} in its cache and none in its attention mask, so a prompt's "
            "tokens see more than those behind it: leave lossy_policy out"
        )


def _slides_in_its_cache_alone(base: Any, config: Any) -> bool:
    """Moshi: `DynamicCache` forgets what left the window, and the mask of the model's own file knows no window."""
    if getattr(config, "sliding_window", None) is None or getattr(config, "layer_types", None):
        return False
    code = sys.modules[type(base.get_decoder()).__module__]
    makers = [name for name in vars(code) if name.startswith("create_") and "mask" in name]
    return makers == ["create_causal_mask"]
