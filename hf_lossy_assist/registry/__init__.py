"""One registry of everything that has a name: `entry` says what a name stands for, `names` registers and looks up, `reading` imports what registers,
`shared` is what a policy and its parts have in common."""

from .entry import KINDS, NEEDS, REQUIRED, Entry, Guarantee, HeadKind, Kind, Method, Need
from .names import (
    Names,
    entries,
    entry,
    forget,
    method,
    method_of_head,
    name_of,
    register_drafter,
    register_filter,
    register_method,
    register_rule,
    register_stop,
    set_base,
)
from .reading import PLUGINS
from .shared import SharedByCopies


__all__ = [
    "KINDS", "NEEDS", "PLUGINS", "REQUIRED", "Entry", "Guarantee", "HeadKind", "Kind", "Method", "Names", "Need",
    "SharedByCopies", "entries", "entry",
    "forget", "method", "method_of_head", "name_of", "register_drafter", "register_filter", "register_method", "register_rule",
    "register_stop", "set_base",
]  # fmt: skip
