"""Collect samples for a profile by strict decoding of prompts with the real engine, while the companion reads along."""

from collections.abc import Sequence

import numpy as np
import safetensors.numpy
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafters.hidden_state import DraftModel
from ...engine.call import Call
from ...filters.goodput import acceptance, probs_of, similarity
from ...policy.policy import LossyPolicy
from ...round import Verified
from ...stops.constant import Constant
from ...training.run_folder import RunFolder, Tell
from .acceptance_table import Samples
from .profiled_runner import InstrumentedRunner, ObserveOnlyFilter, ProfileSettings, run


STARTED = "started.json"  # the record in an unfinished profile


def collect(
    target: PreTrainedModel,
    draft: DraftModel,
    companion: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    settings: ProfileSettings,
    run_folder: RunFolder,
) -> Samples:
    """Decode every prompt strictly at each γ with the companion reading along.

    Each batch of prompts is a file, and existing ones are not run again. Several processes share the batches, and all return all samples.
    """
    batches = [(gamma, first) for gamma in settings.gamma for first in range(0, len(texts), settings.batch_size)]
    names = [f"{gamma}-{first:06d}.safetensors" for gamma, first in batches]

    def make(_: object, index: int, tell: Tell) -> bytes:
        gamma, first = batches[index]
        chosen = texts[first : first + settings.batch_size]
        torch.manual_seed(settings.seed * 1_000_003 + first)
        return safetensors.numpy.save(
            sample(target, draft, companion, tokenizer, chosen, settings, gamma, first, tell)
        )

    run_folder.write_units(names, make, (target, draft, tokenizer), settings.seed)
    pieces, rounds = list[dict[str, np.ndarray]](), 0
    for name in names:
        one = safetensors.numpy.load((run_folder.part / name).read_bytes())
        one["round"] = one["round"] + rounds
        rounds = int(one["round"].max(initial=rounds - 1)) + 1
        pieces.append(one)
    return Samples(**{name: np.concatenate([one[name] for one in pieces]) for name in pieces[0]})


def sample(
    target: PreTrainedModel,
    draft: DraftModel,
    companion: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    settings: ProfileSettings,
    longest: int,
    first: int,
    tell: Tell,
) -> dict[str, np.ndarray]:
    """Return the columns of `Samples` for one batch of prompts whose first is number `first`; rounds are numbered from 0."""
    pieces: list[dict[str, np.ndarray]] = []
    rounds = 0

    def watch(call: Call, verified: Verified) -> None:
        nonlocal rounds
        tell(min((max(call.rows.lengths) - call.rows.width) / settings.new_tokens, 1.0))
        draft, companion_probs = verified.draft, verified.selection.companion
        batch, gamma = draft.tokens.shape
        if gamma == 0:
            return
        assert companion_probs is not None, "the filter always reads it"
        p, q = verified.p[:, :gamma], probs_of(draft)
        if verified.sampling:
            x = (draft.at_tokens(p) / draft.at_tokens(q)).clamp(max=1.0)
        else:
            x = (draft.tokens == verified.argmax[:, :gamma]).float()
        x = x.double()
        reached = torch.cat([torch.ones_like(x[:, :1]), x[:, :-1].cumprod(dim=1)], dim=1)
        slot = torch.arange(gamma).expand(batch, -1)
        text = torch.tensor([first + row for row in call.rows.row_id_list])[:, None].expand(-1, gamma)
        round_ids = torch.arange(rounds, rounds + batch)[:, None].expand(-1, gamma)
        most = torch.full((batch, gamma), call.stop.settings.longest)
        rounds += batch
        inside = (slot < draft.lengths.cpu()[:, None]).numpy()
        values = {
            "s": similarity(draft, companion_probs),
            "a": acceptance(draft, companion_probs),
            "x": x,
            "similarity": torch.minimum(p, q).sum(dim=-1),
            "place": slot,
            "gamma": most,
            "text": text,
            "round": round_ids,
            "reached": reached,
        }
        pieces.append({name: value.cpu().numpy()[inside] for name, value in values.items()})

    policy = LossyPolicy(stop=Constant(longest), filter=ObserveOnlyFilter(companion))
    run(target, tokenizer, texts, InstrumentedRunner(policy, draft, watch), settings)
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
