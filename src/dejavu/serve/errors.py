"""What goes wrong, as OpenAI's clients expect to hear it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dejavu.errors import DejavuError, InputError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


# Fields of several forms: what is wrong with a value that has none of them.
_FORMS = {
    "prompt": "a text, a list of texts, a list of token ids or a list of such lists; a list must "
    "not be empty, nor hold things of two kinds",
    "stop": "a text or a list of at most 64 texts",
}


class ApiError(DejavuError):
    """An answer with a status other than 200. param: the request's field that is wrong."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def of(error: DejavuError, fields: Sequence[str] = ()) -> ApiError:
    """Any error of the engine as an answer: InputErrors are the client's, all others ours.

    fields: of the request; a message of the engine that begins with one tells the `param`.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        named = re.match(r"\w+", str(error))
        param = named.group() if named and named.group() in fields else None
        if param is None and str(error).startswith("the prompt") and "prompt" in fields:
            param = "prompt"
        return ApiError(str(error), 400, param=param)
    return ApiError(str(error), 500)


def unreadable(error: BaseException) -> str | None:
    """What makes a body, or a line of a batch, no JSON; None for an error of another kind."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8: {error.reason}, byte {error.start}"
    if isinstance(error, RecursionError):
        return "it is not JSON that can be read: lists or objects are nested too deeply"
    if isinstance(error, ValueError):
        return f"it is not JSON: {error}"
    return None


def no_object(body: Any, content_type: str) -> ApiError:
    """Of a body that is empty, was not read as JSON because of its type, or is no JSON object."""
    if isinstance(body, bytes) and body:
        said = f"not {content_type}" if content_type else "which is missing"
        return ApiError(f"the body must come with Content-Type: application/json, {said}")
    empty = "; it is empty" if body is None else ""
    return ApiError(f"the body must be a JSON object{empty}")


def invalid(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Of pydantic's list of problems: the first one, by its field."""
    problem = problems[0]
    where = [str(part) for part in problem.get("loc", ()) if part != "body"]
    if problem.get("type") == "json_invalid":
        return ApiError(f"the body is not JSON: {problem.get('ctx', {}).get('error', '')}")
    param = where[0] if where else None
    if param in _FORMS and len(where) > 1:  # of one of its forms, where it may have several
        return ApiError(f"{param} must be {_FORMS[param]}", param=param)
    name = ".".join(where) or "body"
    return ApiError(f"{name}: {problem.get('msg', 'is wrong')}", param=param)
