"""The tokenizer that belongs to a checkpoint."""

from typing import TYPE_CHECKING

from dejavu.errors import CheckpointError
from dejavu.weights.checkpoint import Checkpoint
from dejavu.weights.hub import TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_tokenizer"]


def load_tokenizer(checkpoint: Checkpoint) -> "PreTrainedTokenizerBase":
    """Load a checkpoint's tokenizer from its files alone: no network, no code from the checkpoint.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = checkpoint.tokenizer_path
    if path.suffix == ".gguf" and path.is_file():
        from dejavu.weights.gguf import gguf_tokenizer

        return gguf_tokenizer(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{path} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the tokenizer files of "
            "the model into this folder"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    # A damaged tokenizer.json raises a bare Exception from the Rust side, a tokenizer with its
    # own Python code a ValueError, a missing optional library an ImportError.
    except Exception as error:
        raise CheckpointError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    return tokenizer
