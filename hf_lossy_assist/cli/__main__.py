"""`python -m hf_lossy_assist.cli`: the command `hf-lossy` where it is not installed."""

from . import main


main()
