from . import (
    identity as identity,
)
