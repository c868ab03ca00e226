"""``python -m mxq``: the command where it has no script of its own."""

from mxq.cli import main

main()
