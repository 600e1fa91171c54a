"""dejavu: decode with only the heads and neurons that a token needs."""

__version__ = "0.1.0"
