"""A certificate as a search writes it, and the policy that it is of."""

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.certificate import Certificate
from hf_lossy_assist.policy.policy import compute_fingerprint


POLICY = hla.LossyPolicy(hla.TopK(4), hla.SVIP())


def a_certificate(**more):
    known = {
        "policy": "top_k:k=4+svip", "fingerprint": compute_fingerprint(POLICY), "task": "demo", "problems": 320, "right": 250, "harms": 1, "gains": 2,
        "harm_bound": 0.0147, "net_bound": 0.01, "confidence": 0.95, "max_loss": 0.02, "tried": 4, "batch_size": 8, "speed": 900.0, "of_target": 2.5, "models": {},
        "decoding": {"do_sample": False}, "data": "0" * 64, "machine": "a machine", "versions": {},
    }  # fmt: skip
    return Certificate(**(known | more))
