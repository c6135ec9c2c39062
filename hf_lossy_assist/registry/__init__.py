"""The registry of names: `entry` describes a name, `registry` registers and looks up, `frozen` is the base of policies and
their parts, `discovery` imports the modules that register."""

from .discovery import KINDS, Kind
from .entry import NEEDS, REQUIRED, Entry, HeadKind, Method
from .frozen import Frozen
from .registry import (
    Names,
    find_entry,
    find_method,
    find_method_for_head,
    find_name,
    forget,
    list_entries,
    register_drafter,
    register_filter,
    register_method,
    register_rule,
    register_stop,
    set_base,
)


__all__ = [
    "KINDS", "NEEDS", "REQUIRED", "Entry", "HeadKind", "Kind", "Method", "Names", "Frozen", "find_entry", "find_method",
    "find_method_for_head", "find_name", "forget", "list_entries", "register_drafter", "register_filter", "register_method", "register_rule",
    "register_stop", "set_base",
]  # fmt: skip
