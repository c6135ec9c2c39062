"""The file formats of drafters, by which a folder's config.json is read and its network made."""

from collections.abc import Callable
from typing import NamedTuple

from ..dflash import DFlash2Drafter, DFlashDrafter, DSparkDrafter
from ..eagle import Eagle3Drafter
from ..hidden_state import HiddenStateDrafter
from ..networks.base import HiddenStateNetwork
from .configs import Spec
from .dflash_formats import (
    is_dflash,
    is_dflash2,
    is_dspark,
    make_dflash,
    make_dflash2,
    make_dspark,
    read_dflash,
    read_dflash2,
    read_dspark,
)
from .eagle_formats import make_eagle3, read_eagle3


class DrafterFormat(NamedTuple):
    """A file format of drafters.

    Args:
        drafter: the class that such files are loaded as.
        matches: whether a config is of this format.
        read_config: makes the network's config; raises `ValueError` or `TypeError`, one line.
        make_network: makes the network from that config and the weights, by their names in files.
    """

    drafter: type[HiddenStateDrafter]
    matches: Callable[[Spec], bool]
    read_config: Callable[[Spec, str], object]
    make_network: Callable[..., HiddenStateNetwork]


# The first that matches reads a folder; the last one reports files that match none.
FORMATS = (
    DrafterFormat(DSparkDrafter, is_dspark, read_dspark, make_dspark),
    DrafterFormat(DFlashDrafter, is_dflash, read_dflash, make_dflash),
    DrafterFormat(DFlash2Drafter, is_dflash2, read_dflash2, make_dflash2),
    DrafterFormat(Eagle3Drafter, lambda spec: True, read_eagle3, make_eagle3),
)
