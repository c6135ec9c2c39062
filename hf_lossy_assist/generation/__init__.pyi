from . import (
    arguments as arguments,
)
