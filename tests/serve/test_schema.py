"""Whatever fits the published schema, or does not: an answer, never a fault of the server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from .process import Server

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra dejavu-llm[dev]")

MODEL = "org/chatty"


def test_generated_requests_never_break_the_server(server: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: list[int] = []
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=12,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = MODEL  # else nearly all end at the same 404
            answer = case.call(timeout=60)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]
            statuses.append(answer.status_code)

        ask()
        assert server.health() is not None
    assert {200, 400} <= set(statuses)


def test_the_schema_is_complete(server: Server) -> None:
    found = httpx.get(f"{server.url}/openapi.json").json()
    assert set(found["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/metrics",
    }
    chat = found["paths"]["/v1/chat/completions"]["post"]
    assert {"application/json", "text/event-stream"} == set(chat["responses"]["200"]["content"])
    error = found["components"]["schemas"]["ErrorObject"]["properties"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "422" not in chat["responses"], "a wrong request is a 400 here"
