"""What a policy is, down to the weights of its heads, as one hash: of another setting or another head it is another."""

import hashlib
import json

from ..artifacts.heads import Head
from ..artifacts.profile import Profile
from .policy import LossyPolicy


def fingerprint(policy: LossyPolicy) -> str:
    """SHA-256 of the JSON form, in which each head and profile stands by its content and not by where it lies.

    Raises: `ValueError`, one line, for a part without a name.
    """
    names = {id(part): _content(part) for part in policy._saved().values()}
    return hashlib.sha256(json.dumps(policy._spec(names), sort_keys=True).encode()).hexdigest()


def _content(part: Head | Profile) -> str:
    if isinstance(part, Head):
        return part.digest
    return hashlib.sha256(repr(part._content()).encode()).hexdigest()
