"""Every error a user of dejavu is meant to see.

    DejavuError
    ├── ConfigError        a field of a model or engine configuration is wrong
    ├── CheckpointError    a weight file or a tensor in it is wrong
    ├── PlanError          a sparsity plan is wrong or belongs to another model
    ├── InputError         a prompt, an option or a sampling parameter is wrong (a ValueError too)
    └── BackendError       the kernels cannot run here

A message names the field or file that is wrong and says what to do about it. Anything else that
escapes (``AssertionError``, ``TypeError``, ...) is a bug in dejavu.
"""

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DejavuError",
    "InputError",
    "PlanError",
]


class DejavuError(Exception):
    """Base of all errors below; catch it to catch them all."""


class ConfigError(DejavuError):
    """A configuration field is missing, unknown, or contradicts another one."""


class CheckpointError(DejavuError):
    """A weight file or tensor is missing, unexpected, truncated, unreadable or of a wrong shape."""


class PlanError(DejavuError):
    """A sparsity plan is unreadable, incomplete, or was made for another model."""


class InputError(DejavuError, ValueError):
    """A prompt, an option or a sampling parameter has a value that cannot be used."""


class BackendError(DejavuError):
    """The kernel extension is missing or the device is not supported."""
