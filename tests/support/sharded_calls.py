"""Run by `torchrun`: calls on targets that FSDP2 shards over the ranks, each rank with prompts and a length of its own."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import hf_lossy_assist as hla
from support import small, tiny
from support.spread_calls import Failing, policies


NEW = (6, 24)  # the ranks finish at different times
ROWS = ((0, 3), (5, 1, 0))


def settings(rank, draft, policy, sampling):
    """One rank's call."""
    return {
        "max_new_tokens": NEW[rank], "return_dict_in_generate": True, "do_sample": sampling, "assistant_model": draft,
        "lossy_policy": policy, "generator": torch.Generator().manual_seed(rank),
    }  # fmt: skip


def prompts(rank):
    """One rank's texts."""
    return small.ragged(ROWS[rank], vocab=tiny.VOCABULARY)


def written(out):
    """Return the parts of a call's output that are compared."""
    stats = out.speculation.summary()
    return [out.sequences.tolist(), stats["num_accepted_draft_tokens"], stats["num_lossy_accepts"]]


def sharded(model):
    """The model with each layer, and the rest, sharded over all ranks."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def error_line(function, *args, **call):
    """Return the line that a call raises."""
    try:
        function(*args, **call)
        return "nothing"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def written_many(*args, **call):
    """`generate_many`, to its end."""
    return list(hla.generate_many(*args, **call))


def main():
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    found = {}
    for name in sys.argv[2].split(","):
        target, draft = (
            AutoModelForCausalLM.from_pretrained(folder / f"{name}{kind}", dtype=torch.float64).eval()
            for kind in ("", "-draft")
        )
        hla.enable(sharded(target))
        torch.manual_seed(rank)
        for kind, policy in policies(draft).items():
            for sampling in (False, True):
                out = target.generate(**prompts(rank), **settings(rank, draft, policy, sampling))
                found[f"{name} {kind} {'sampled' if sampling else 'greedy'}"] = written(out)
        call = {"assistant_model": draft, "lossy_policy": "svip", "max_new_tokens": 8}
        failing = {"stopping_criteria": [Failing()]} if rank == 0 else {}
        found[f"{name} an error"] = error_line(target.generate, **prompts(rank), **call | failing)
        refused = torch.full((1, 4), tiny.VOCABULARY) if rank == 0 else torch.ones(1, 4, dtype=torch.int64)
        found[f"{name} a refusal"] = error_line(target.generate, refused, **call)
        drafting = {"assistant_model": target}
        found[f"{name} draft"] = error_line(target.generate, **prompts(rank), **call | drafting)
        many = list(range(5, 9)), list(range(6, 9))
        found[f"{name} many"] = error_line(written_many, target, many, **call)
        compiled = {"cache_implementation": "static"}
        found[f"{name} compiled"] = error_line(target.generate, **prompts(rank), **call | compiled)
        same = target.generate(**prompts(0), **call, do_sample=False, synced_gpus=False)
        found[f"{name} the same"] = same.tolist()
        target(prompts(0)["input_ids"]).logits.sum().backward()  # as between two steps of training
        grads = [parameter.grad.full_tensor() for parameter in target.parameters()]
        found[f"{name} gradients"] = all(bool(grad.isfinite().all()) for grad in grads)
    whole = AutoModelForCausalLM.from_pretrained(folder / f"{name}-draft", dtype=torch.float64).eval()
    out = hla.enable(whole).generate(**prompts(rank), **settings(rank, draft, "svip", False), synced_gpus=True)
    found["whole models in step"] = out.sequences.tolist()
    for weight in whole.parameters():
        weight.ds_id = 0  # as DeepSpeed does
    found["zero3 target"] = error_line(whole.generate, **prompts(rank), assistant_model=draft, lossy_policy="svip")
    found["zero3 draft"] = error_line(
        hla.enable(draft).generate, **prompts(rank), assistant_model=whole, lossy_policy="svip"
    )
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
