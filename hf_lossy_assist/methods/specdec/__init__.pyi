from . import (
    fit as fit,
)
