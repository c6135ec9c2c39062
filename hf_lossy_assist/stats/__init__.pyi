from . import (
    intervals as intervals,
)
