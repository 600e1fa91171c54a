"""Where tensors live: devices by the name a user gives, and whether something fits into memory."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from dejavu.errors import BackendError, InputError

CPU = torch.device("cpu")


def resolve_device(name: str | torch.device) -> torch.device:
    """`cpu`, `cuda` (the current GPU) or `cuda:N` as a device with its number.

    Raises InputError for another name, BackendError for a GPU that is not there.
    """
    text = str(name)
    kind, _, number = text.partition(":")
    if text == "cpu":
        return CPU
    if kind != "cuda" or (text != "cuda" and not number.isdecimal()):
        raise InputError(f"--device {text!r} is unknown; what exists is cpu, cuda and cuda:N")
    if not torch.cuda.is_available():
        reason = (
            f"this PyTorch ({torch.__version__}) is built without CUDA"
            if torch.version.cuda is None
            else "PyTorch finds no GPU or no driver; `nvidia-smi` may say why"
        )
        raise BackendError(f"--device {text} cannot be used: {reason}; use --device cpu")
    count = torch.cuda.device_count()
    index = int(number) if number else torch.cuda.current_device()
    if index >= count:
        raise BackendError(
            f"--device {text} does not exist: this machine has {count} GPUs, cuda:0 to "
            f"cuda:{count - 1}"
        )
    return torch.device("cuda", index)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one for as long: kernels start on the current device, wherever their
    tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken: of a GPU what nobody holds, else the machine's memory."""
    if device.type != "cuda":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free: int = torch.cuda.mem_get_info(device)[0]
    # What torch's allocator holds and does not use is ours to take as well.
    held: int = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + held


def lost(device: torch.device) -> bool:
    """Whether a GPU has stopped answering: after a fault of a kernel every call of the process that
    made it fails."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def check_fit(needed: int, device: torch.device, what: str, fix: str) -> None:
    """Raise InputError, with all figures, where `needed` bytes do not fit onto a GPU.

    what: `the model ... in fp16`. fix: what a user can do about it. A CPU is never asked: it swaps.
    """
    if device.type != "cuda":
        return
    free = free_memory(device)
    if needed > free:
        raise InputError(
            f"{what} needs {needed / 1e9:.2f} GB and {device} has {free / 1e9:.2f} GB free: "
            f"{(needed - free) / 1e9:.2f} GB are missing; {fix}"
        )
