"""Errors as clients see them, in the OpenAI shape.

    ApiError               anything that ends a call with a status and `{"error": {...}}`

Foreign errors become one of these in `translate`, the only place that maps them. Non-goal: the admin
interface, whose errors have their own shape (`admin`).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from ullage_engine.api.text import PromptError
from ullage_engine.errors import (
    Draining,
    LoopUnavailable,
    Overloaded,
    QueueTimeout,
    RequestFailed,
    RequestRejected,
    RequestTooLong,
)


def _short() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxlevel, short.maxdict, short.maxlist = 2, 3, 4
    short.maxstring, short.maxlong, short.maxother = 60, 40, 60
    return short


_SHORT = _short()


class ApiError(Exception):
    """One refused or failed call."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type_
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is wrong, and sending it again will not help."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, value: object, remedy: str) -> ApiError:
    """400: a parameter that would change the answer, and that this server does not have."""
    return invalid(f"{param}={shown(value)} is not supported; {remedy}", param=param, code="unsupported_parameter")


def too_long(prompt_tokens: int, max_tokens: int, limit: int, *, param: str) -> ApiError:
    """400: prompt and answer do not fit the context."""
    return invalid(
        f"{prompt_tokens} prompt tokens and {max_tokens} tokens to generate exceed the context of {limit} "
        "tokens; shorten the prompt or lower max_tokens",
        param=param,
        code="context_length_exceeded",
    )


def from_validation(errors: Sequence[ErrorDetails]) -> ApiError:
    """400 from pydantic's findings: the first field at fault, its value, and all that is wrong with it."""
    first = errors[0]
    at = _field_path(first)
    problems = dict.fromkeys(error["msg"] for error in errors if _field_path(error) == at)
    text = " or ".join(problem.removeprefix("Value error, ") for problem in problems)
    text = text.replace(" or Input should be ", " or ")
    field = ".".join(at)
    if not field:
        return invalid(f"the body is not valid: {text}")
    value = "" if first["type"] == "missing" else f"={shown(first['input'])}"
    return invalid(f"{field}{value} is not valid: {text}", param=field)


def _field_path(error: ErrorDetails) -> tuple[str, ...]:
    """Where in the body; what pydantic adds to tell a union's members apart is left out."""
    path: list[str] = []
    for part in error["loc"]:
        if part == "str" or str(part).startswith("list["):
            break
        path.append(str(part))
    return tuple(path)


def translate(error: Exception) -> ApiError:
    """Any error as an ApiError; one that nobody foresaw becomes a 500 without details."""
    match error:
        case ApiError():
            return error
        case Draining():
            return _later(503, error, type_="service_unavailable", code="draining")
        case QueueTimeout():
            return _later(503, error, type_="service_unavailable", code="queue_timeout")
        case Overloaded():
            return _later(429, error, type_="rate_limit_error", code="overloaded")
        case RequestTooLong():
            return invalid(str(error), param=error.param, code="context_length_exceeded")
        case RequestRejected():
            return invalid(str(error), param=error.param)
        case PromptError():
            return invalid(str(error), param="messages")
        case RequestFailed():
            return ApiError(500, str(error), type_="server_error", code="request_failed")
        case LoopUnavailable():
            return ApiError(503, str(error), type_="service_unavailable", code="loop_unavailable")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    return ApiError(500, "internal error; the server's log says more", type_="server_error", code="internal_error")


def _later(status: int, error: Overloaded, *, type_: str, code: str) -> ApiError:
    seconds = max(1, math.ceil(error.retry_after_s))
    headers = {"Retry-After": str(seconds)}
    return ApiError(status, str(error), type_=type_, param=error.param, code=code, headers=headers)


def shown(value: object) -> str:
    """A value for a message: short, on one line, and encodable even where the value is not."""
    return _SHORT.repr(value)


def install(app: FastAPI) -> None:
    """Make every error of an app leave it in the OpenAI shape."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        found = translate(error)
        return JSONResponse(found.body(), found.status, headers=found.headers)

    for kind in (
        ApiError,
        RequestRejected,
        RequestFailed,
        LoopUnavailable,
        PromptError,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, answer)
