"""Models larger than memory: the neurons that a token needs are read from a bundled file."""
