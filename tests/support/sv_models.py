"""Shared by several tests."""

import numpy as np
import torch

from hf_lossy_assist.artifacts.conditions import describe_machine
from hf_lossy_assist.artifacts.profile_tables import Bins, Latency
from hf_lossy_assist.artifacts.sv_profile import Profile
from hf_lossy_assist.models.identity import ModelIdentity


def steep(target, draft, companion, of: Bins, cost: float = 0.3, batch: int = 1, pays: float = 2.0) -> Profile:
    """A profile whose rounds cost 1 + `cost` for each verified token of a row, so that much is dropped."""
    tokens = np.arange(8 * batch + 1)
    latency = Latency(np.array([batch]), tokens[None], (1 + cost * tokens / batch)[None], *np.zeros((3, 1)))
    models = (ModelIdentity.of(m) for m in (target, draft, companion))
    return Profile(of, latency, 8, np.array([pays]), *models, "", {}, describe_machine(torch.device("cpu")))
