"""python -m minisgl, the same as the command minisgl."""

from minisgl.cli import main

main()
