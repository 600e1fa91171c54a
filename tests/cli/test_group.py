"""Names of fields become the options that set them."""

from __future__ import annotations

import pytest

from dejavu.cli.group import as_typed

FLAGS = ["--max-loss", "--plan", "-p", "--level", "--memory-limit", "--no-heads"]


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("max_loss must be above 0", "--max-loss must be above 0"),
        ("fast_loss 1 is below max_loss 2", "fast_loss 1 is below --max-loss 2"),
        ("plan 'x': no such folder", "--plan 'x': no such folder"),
        ("level: no such level of a plan", "--level: no such level of a plan"),
        ("the plan has no such level", "the plan has no such level"),
        (
            "plans/max_loss.json: max_loss.x is no level",
            "plans/max_loss.json: max_loss.x is no level",
        ),
        ("--max-loss: not a share", "--max-loss: not a share"),
    ],
)
def test_names_become_flags(said: str, typed: str) -> None:
    assert as_typed(said, FLAGS) == typed
