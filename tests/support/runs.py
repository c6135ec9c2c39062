"""A hand-made comparison: two prompts, four arms, every figure known."""

import hf_lossy_assist as hla
from hf_lossy_assist.evaluation.arms import Arm
from hf_lossy_assist.evaluation.writer import ArmOutput


LOSSY = hla.LossyPolicy(hla.TopK(4))
ARMS = [
    Arm("target", "target", write=print),
    Arm("assisted", "assisted", write=print),
    Arm("svip", "policy", write=print, policy=hla.as_policy("svip")),
    Arm("top_k:k=4", "policy", lossless=False, write=print, policy=LOSSY),
]


def answer(arm, prompt, ids, seconds, **more):
    return ArmOutput(arm, prompt, 1, prompt, "text", list(ids), seconds, **more)


def a_run(svip=1.0, copies=1):
    """Two prompts, `copies` times; `svip`: seconds of each of its texts."""
    runs = [_two(svip) for _ in range(copies)]
    for copy, run in enumerate(runs):
        for reply in run:
            reply.prompt, reply.unit = reply.prompt + 2 * copy, reply.unit + 2 * copy
    return [reply for run in runs for reply in run]


def _two(svip):
    return [
        answer("target", 0, range(40), 2.0, first_token=0.1, target_calls=40, right=True),
        answer("target", 1, range(60), 4.0, first_token=0.3, target_calls=60, right=False),
        answer("assisted", 0, range(40), 1.0, target_calls=10, right=True),
        answer("assisted", 1, range(60), 3.0, target_calls=15, right=False),
        answer("svip", 0, range(40), svip, target_calls=8, num_draft_tokens=40, num_accepted_draft_tokens=32, right=True),
        answer("svip", 1, range(60), svip, target_calls=12, num_draft_tokens=60, num_accepted_draft_tokens=48, right=False),
        answer(
            "top_k:k=4", 0, range(1, 41), 0.5, target_calls=5, num_draft_tokens=50, num_accepted_draft_tokens=35,
            num_lossy_accepts=4, right=False,
        ),
        answer(
            "top_k:k=4", 1, range(60), 0.5, target_calls=5, num_draft_tokens=50, num_accepted_draft_tokens=45,
            num_lossy_accepts=6, num_unchecked_tokens=10, right=True,
        ),
    ]  # fmt: skip
