"""Content of a head's config.json: the state it reads, the models it was made for, how it was trained."""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..validation import check_int, check_number, listed, nearest, shown
from .features import FeatureSpec
from .identity import ModelIdentity
from .json_io import JSONObject


WIDEST = 2**20  # features of a hidden state
LARGEST = 2**30  # weights of a head's first layer: 4 GiB in float32
SHAPES = ("linear", "mlp")
POLARITIES = ("acceptable", "important")  # the label that the probability refers to: SPRINTER's, AutoJudge's


# Types of the fields that are only stored.
FIELDS: dict[str, tuple[type, str]] = {
    "width": (int, "a whole number"),
    "features": (FeatureSpec, "a FeatureSpec"),
    **dict.fromkeys(("target", "draft"), (ModelIdentity, "a ModelIdentity")),
    **dict.fromkeys(("method", "label", "tokenizer_hash"), (str, "a text")),
    **dict.fromkeys(("decoding", "training", "metrics", "versions", "model_weights"), (Mapping, "a dict")),
}
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
    threshold: float | None = None
    lam: float | None = None
    model_weights: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_int("HeadConfig.hidden_size", self.hidden_size, 1, WIDEST)
        if not isinstance(self.kind, str) or self.kind not in SHAPES:
            raise ValueError(f"HeadConfig: {nearest('kind', str(self.kind), SHAPES)}")
        if self.kind == "mlp" or self.width is not None:
            check_int("HeadConfig.width", self.width, 1, WIDEST)
        if self.numbers > LARGEST:
            raise ValueError(
                f"HeadConfig: {self.hidden_size} numbers × {self.width} hidden units are more than {LARGEST} weights: choose a "
                "smaller width"
            )
        if self.polarity not in POLARITIES:
            raise ValueError(f"HeadConfig: {nearest('polarity', str(self.polarity), POLARITIES)}")
        for name, high in (("threshold", 1.0), ("lam", math.inf)):
            if getattr(self, name) is not None:
                check_number(f"HeadConfig.{name}", getattr(self, name), 0.0, high)
        for name, (kind, expected) in FIELDS.items():
            value = getattr(self, name)
            optional = name in ("target", "draft", "tokenizer_hash", "width") and value is None
            if not optional and (not isinstance(value, kind) or isinstance(value, bool)):
                raise TypeError(f"HeadConfig.{name}: expected {expected}, got {shown(value)}")

    @property
    def numbers(self) -> int:
        """Number of weights in the first layer."""
        return self.hidden_size * (self.width if self.kind == "mlp" and self.width is not None else 1)

    def to_dict(self) -> JSONObject:
        """Return the JSON form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, spec: Mapping[str, object], where: str = "head config") -> "HeadConfig":
        """Read the JSON form, including that of older versions; entries of a later version are ignored with a warning."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(spec) - known)
        if unknown:
            warnings.warn(f"{where}: entries not known to this version are ignored: {listed(unknown)}", stacklevel=2)
        values: JSONObject = {name: value for name, value in spec.items() if name in known}
        try:
            for name, kind in (("features", FeatureSpec), ("target", ModelIdentity), ("draft", ModelIdentity)):
                if isinstance(values.get(name), Mapping):
                    given = values[name]
                    values[name] = ModelIdentity.from_dict(given) if kind is ModelIdentity else FeatureSpec(**given)
                elif values.get(name) is not None or (name == "features" and name in values):
                    raise TypeError(f"{name}: expected an object, got {shown(values[name])}")
            for name in ("decoding", "training", "metrics", "versions", "model_weights"):
                if not isinstance(values.get(name, {}), Mapping):
                    raise TypeError(f"{name}: expected an object, got {shown(values[name])}")
            return cls(**_move_fields(values))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None


def _move_fields(values: JSONObject) -> JSONObject:
    """Move the threshold and λ in older versions' configs to their present fields."""
    for name, place, entry in MOVED:
        old = dict(values.get(place, {}))
        if values.get(name) is None and entry in old:
            values |= {name: old.pop(entry), place: old}
    return values
