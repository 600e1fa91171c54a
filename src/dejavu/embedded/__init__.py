"""What the package carries: a small ReLU model, its plan, and public-domain text samples.

The model is OPT-architecture, 30M parameters, int8 (`README.md` beside this file has its card).
Wherever a model or plan is asked for, the name `relu-30m` means these unless a folder of that name
is there.
"""

from __future__ import annotations

from pathlib import Path

NAME = "relu-30m"
FOLDER = Path(__file__).parent
MODEL = FOLDER / "model"
PLAN = FOLDER / "plan"
HELDOUT_TEXT = FOLDER / "heldout.txt"  # 34 books the model never saw; 110k tokens of its vocabulary
CALIBRATION_TEXT = FOLDER / "calibration.txt"


def model_path(source: str) -> str:
    """The folder of the embedded model if `source` names it, else `source` itself."""
    return _resolve(source, MODEL)


def plan_path(source: str) -> str:
    """The folder of the embedded plan if `source` names it, else `source` itself."""
    return _resolve(source, PLAN)


def _resolve(source: str, folder: Path) -> str:
    return str(folder) if source == NAME and not Path(source).exists() else source
