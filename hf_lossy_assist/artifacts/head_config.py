"""Content of a head's config.json: the state it reads, the models it was made for, how it was trained."""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..validation import check_int, check_number, listed, nearest
from .features import FeatureSpec
from .identity import ModelIdentity
from .json_io import JSONObject, check_types


WIDEST = 2**20  # features of a hidden state
LARGEST = 2**30  # weights of a head's first layer: 4 GiB in float32
SHAPES = ("linear", "mlp")
POLARITIES = ("acceptable", "important")  # the label that the probability refers to: SPRINTER's, AutoJudge's
# Where heads saved by older versions have some fields: the field, the dict, the entry in it.
MOVED = (("threshold", "metrics", "threshold"), ("lam", "training", "lambda"))


@dataclass(frozen=True)
class HeadConfig:
    """Content of a head's config.json, except the weights' checksum.

    Args:
        method: the method that the head was trained for, a name from `register_method`.
        polarity: the label that its probability refers to, "acceptable" or "important".
        decoding: the sampling settings of the distributions that the labels are based on.
        training, metrics, versions: for readers: how the head was trained, and its figures on held-out prompts.
        threshold: the decision threshold, if fitting chose one; None: the method's.
        lam: λ of the label q(x) ≤ λ·p(x), if the method has one.
        model_weights: by role, precision and `weights_hash` of the models, "float32:…"; heads of older versions have none.

    Raises: `ValueError` or `TypeError`, one line.
    """

    hidden_size: int
    kind: str = "linear"
    width: int | None = None  # of an MLP's hidden layer
    method: str = "sprinter"
    polarity: str = "acceptable"
    label: str = ""
    features: FeatureSpec = FeatureSpec()
    target: ModelIdentity | None = None
    draft: ModelIdentity | None = None
    tokenizer_hash: str | None = None
    decoding: dict[str, object] = field(default_factory=dict)
    training: JSONObject = field(default_factory=dict)
    metrics: JSONObject = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    threshold: float | int | None = None
    lam: float | int | None = None
    model_weights: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        check_int("HeadConfig.hidden_size", self.hidden_size, 1, WIDEST)
        for name, known in (("kind", SHAPES), ("polarity", POLARITIES)):
            if getattr(self, name) not in known:
                raise ValueError(f"HeadConfig: {nearest(name, getattr(self, name), known)}")
        if self.kind == "mlp" or self.width is not None:
            check_int("HeadConfig.width", self.width, 1, LARGEST // self.hidden_size)
        for name, high in (("threshold", 1.0), ("lam", math.inf)):
            if getattr(self, name) is not None:
                check_number(f"HeadConfig.{name}", getattr(self, name), 0.0, high)

    def to_dict(self) -> JSONObject:
        """Return the JSON form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, spec: Mapping[str, object], where: str = "head config") -> "HeadConfig":
        """Read the JSON form, including that of older versions; entries of a later version are ignored with a warning."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(spec) - known):
            warnings.warn(f"{where}: entries not known to this version are ignored: {listed(unknown)}", stacklevel=2)
        values: JSONObject = {name: value for name, value in spec.items() if name in known}
        try:
            for name, kind in (("features", FeatureSpec), ("target", ModelIdentity), ("draft", ModelIdentity)):
                if values.get(name) is not None:
                    values[name] = kind(**values[name])
            for name, place, entry in MOVED:
                old = dict(values.get(place, {}))
                if values.get(name) is None and entry in old:
                    values |= {name: old.pop(entry), place: old}
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None
