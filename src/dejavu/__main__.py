"""`python -m dejavu`."""

from dejavu.cli import main

main()
