"""The arithmetic: weight storage, selections, ops and their backends."""
