"""Errors of a command, with its options named as they are typed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from typer.core import TyperGroup

from dejavu.errors import DejavuError


class Group(TyperGroup):
    """Commands whose errors say `--max-loss` where the layers below say `max_loss`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DejavuError as error:
            command = self.commands.get(ctx.invoked_subcommand or "")
            options = () if command is None else command.params
            said = as_typed(str(error), [flag for o in options for flag in o.opts])
            error.args = (said,)
            raise


def as_typed(message: str, flags: Iterable[str]) -> str:
    """A message with names of fields replaced by the flags that set them.

    Names of several words are replaced wherever they stand; single words are also ordinary ones,
    and mean the field where they begin the message.
    """
    names = {flag[2:].replace("-", "_"): flag for flag in flags if flag.startswith("--")}

    def typed(found: re.Match[str]) -> str:
        return names.get(found[0], found[0])

    message = re.sub(r"^\w+(?=[ :])", typed, message)
    return re.sub(r"(?<![\w./-])[a-z]+(?:_[a-z]+)+(?![\w./-])", typed, message)
