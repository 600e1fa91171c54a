"""Cut the text samples that the package carries out of a corpus of public-domain books.

    python recipes/embedded_text.py CORPUS_FOLDER src/dejavu/embedded

`heldout.txt`: 39 passages of 12,000 characters, each of another book that the embedded model has
never seen (`validation.txt`). `calibration.txt`: 24 passages of 10,000 characters from books of
its training text. Documents are separated by a line `<|endoftext|>`.
"""

from __future__ import annotations

import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

SEPARATOR = "<|endoftext|>"
PIECE = range(36_800, 37_001)  # characters of a held-out book's piece; other sources differ
BOOK = range(100_000, 10_000_000)  # of a whole book in the training text; nothing else is as long
# Later editors' forewords, perhaps under a copyright of their own.
EXCLUDED = ("fan letter from a fellow writer", "Mark Twain made of 1601")


def books(lines: Iterator[str], length: range) -> Iterator[str]:
    """Documents of a corpus file that are as long as books are there, in order."""
    document: list[str] = []
    for line in lines:
        if line.rstrip("\n") != SEPARATOR:
            document.append(line)
            continue
        text = "".join(document).strip("\n")
        document = []
        if len(text) in length and not any(words in text for words in EXCLUDED):
            yield text


def passage(text: str, length: int) -> str:
    """Whole paragraphs of up to `length` characters from the last two thirds, past title pages."""
    start = text.find("\n\n", len(text) // 3) + 2
    end = text.rfind("\n", start, start + length)
    return text[start:end].strip("\n")


def write(path: Path, passages: list[str]) -> None:
    """One file of passages, separated as the corpus does."""
    path.write_text(f"\n{SEPARATOR}\n".join(passages) + "\n", encoding="utf-8")
    print(f"{path}: {len(passages)} documents, {path.stat().st_size:,} bytes")


def main(corpus: Path, out: Path) -> None:
    """Cut both samples."""
    with (corpus / "validation.txt").open(encoding="utf-8") as lines:
        write(out / "heldout.txt", [passage(book, 12_000) for book in books(lines, PIECE)])
    with lzma.open(corpus / "train-0.txt.xz", "rt", encoding="utf-8") as lines:
        pieces = books(lines, BOOK)
        write(out / "calibration.txt", [passage(next(pieces), 10_000) for _ in range(24)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
