"""What goes wrong, in the shape of OpenAI's error bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException
from typing_extensions import TypedDict

_PLAIN = {"False": "false", "None": "null", "a valid dictionary or object to extract fields from": "an object"}
_PLAIN |= {"a valid dictionary": "an object", "a valid": "a", "a integer": "an integer"}


class ErrorDetail(TypedDict):
    """What a client is told: for people, by kind, which field, and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every answer with a status from 400 on, and of an error in the middle of a stream."""

    error: ErrorDetail


class ApiError(HTTPException):
    """Ends a request with this status. Of the client's making below 500, of ours from there on."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.body = error_body(status, message, param, code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The 400 for a request that does not validate: its first problem, in words, with the field's path.

    Args:
        problems: pydantic's, as FastAPI passes them on: the location starts with "body".
    """
    problem = problems[0]
    kind, context = problem["type"], problem.get("ctx", {})
    path = [str(step) for step in problem["loc"][1:] if str(step)[:1] not in ("~", "[")]  # ~: a branch of a union
    param = ".".join([*path, context["field"]] if kind == "unknown_field" else path)
    if not path and kind != "unknown_field":
        return ApiError(400, "the body must be a JSON object" if kind != "missing" else "the request has no body")
    if kind == "unknown_field":
        return ApiError(400, f"{param} is not supported by this server", param, "unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param} is missing", param, "missing_required_parameter")
    if kind == "none_required":
        return ApiError(400, f"{param} is not supported by this server: leave it out", param, "unsupported_parameter")
    value = json.dumps(problem["input"], default=str)
    value = value if len(value) <= 80 else value[:77] + "…"
    rule = re.sub(
        r"^\w+ should|after validation, not .*", lambda found: "must" if found.start() == 0 else "", problem["msg"]
    )
    for python, plain in _PLAIN.items():
        rule = rule.replace(python, plain)
    return ApiError(400, f"{param} is {value}, but {rule.strip()}", param, "invalid_value")
