"""Decoders: one forward for all, and a file for each architecture, named after its `model_type`."""
