"""Run by `torchrun`: calls on targets that tensor parallelism spreads over the ranks, the result of each rank in a file of its own."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.generation.stopping_criteria import MaxTimeCriteria

import hf_lossy_assist as hla
from support import small, tiny


CONFIGS = (
    {"features": hla.FeatureSpec(position="predicting")},
    {"features": hla.FeatureSpec(model="target", position="token"), "polarity": "important"},
)
SETTINGS = {"max_new_tokens": 24, "return_dict_in_generate": True}


def policies(draft):
    """One for each method, and one that counts what each text may lose."""
    torch.manual_seed(3)
    on_draft, on_target = (hla.LinearHead(hla.HeadConfig(32, **config)).double() for config in CONFIGS)
    return {
        "strict": "strict",
        "svip": "svip",
        "staged": hla.LossyPolicy(stop=hla.Constant(4), filter=hla.Staged(draft)),
        "sprinter": hla.Sprinter(on_draft, 0.5, max_draft=4, patience=1.0),
        "judge": hla.AutoJudge(on_target, 0.5, window=4),
        "top_k": hla.LossyPolicy(hla.Limited(hla.TopK(4), per_request=30), hla.Heuristic(3, 6)),
    }


def main():
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    found = {}
    for name in sys.argv[2].split(","):
        target = AutoModelForCausalLM.from_pretrained(folder / name, tp_plan="auto", dtype=torch.float64).eval()
        draft = AutoModelForCausalLM.from_pretrained(folder / f"{name}-draft", dtype=torch.float64).eval()
        assert target.tp_size == dist.get_world_size() == 2
        hla.enable(target)
        torch.manual_seed(rank)  # the ranks' own random numbers differ
        prompts = small.ragged((0, 3, 5, 1), vocab=tiny.VOCABULARY)
        for kind, policy in policies(draft).items():
            for sampling in (False, True):
                given = SETTINGS | {"do_sample": sampling, "assistant_model": draft, "lossy_policy": policy}
                out = target.generate(**prompts, **given)
                stats = out.speculation.summary()
                found[f"{name} {kind} {'sampled' if sampling else 'greedy'}"] = [
                    out.sequences.tolist(), stats["num_accepted_draft_tokens"], stats["num_lossy_accepts"],
                ]  # fmt: skip
        if rank == 1:
            prompts["input_ids"][0, -1] += 1
        for what, change in {"other prompts": {}, "an error": {"stopping_criteria": [Failing()]}}.items():
            if change:
                prompts["input_ids"][0, -1] -= rank
            try:
                target.generate(**prompts, **SETTINGS, assistant_model=draft, lossy_policy="svip", **change)
                found[f"{name} {what}"] = "nothing"
            except Exception as error:
                found[f"{name} {what}"] = f"{type(error).__name__}: {error}"
        try:
            target.generate(**prompts, **SETTINGS, assistant_model=target, lossy_policy="svip")
        except ValueError as error:
            found[f"{name} draft"] = str(error)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Failing(MaxTimeCriteria):
    """Fails on the rank that asks it."""

    def __init__(self):
        super().__init__(1e9)

    def __call__(self, input_ids, scores, **kwargs):
        raise RuntimeError("a criterion failed")


if __name__ == "__main__":
    main()
