"""Responses to requests that fail, in the format of the API that the request's path belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from qcompile.errors import (
    BusyError,
    LongPromptError,
    OverflowedError,
    QCompileError,
    UnsupportedError,
    UsageError,
    shown,
)
from qcompile.runtime.server import api

MESSAGES = "/v1/messages"
"""Paths that begin with this belong to Anthropic's API, all others to OpenAI's."""
_MESSAGES_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Kinds of errors by status in Anthropic's API."""


class NotFoundError(UsageError):
    """A request names what is not here. code, param: of the error in OpenAI's format."""

    code = "not_found"
    param: str | None = None


class UnknownModelError(NotFoundError):
    """A request names another model than the one served."""

    code, param = "model_not_found", "model"


def add_error_handlers(app: FastAPI) -> None:
    """Have the application answer all errors in the format of the API."""
    app.add_exception_handler(QCompileError, refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


async def refused(request: Request, error: Exception) -> JSONResponse:
    """The response to an error of qcompile."""
    if isinstance(error, NotFoundError):
        return _response(request, 404, str(error), code=error.code, param=error.param)
    if isinstance(error, UnsupportedError) and not isinstance(error, OverflowedError):
        return _response(request, 400, str(error))
    if isinstance(error, UsageError):
        code = "context_length_exceeded" if isinstance(error, LongPromptError) else None
        return _response(request, 400, str(error), code=code)
    if isinstance(error, BusyError):
        return _response(request, 429, str(error), "rate_limit_error", headers={"Retry-After": "1"})
    status = 500 if isinstance(error, OverflowedError) else 503
    return _response(request, status, str(error), "server_error")


async def _malformed(request: Request, error: Exception) -> JSONResponse:
    """Report one error of a malformed request with its position: an unknown field, or else the first error."""
    assert isinstance(error, RequestValidationError)
    wrong = error.errors()
    unknown = [one for one in wrong if one["type"] == "extra_forbidden"]
    first = (unknown or wrong)[0]
    place = ".".join(str(part) for part in first["loc"][1:])
    what = "is not supported" if unknown else first["msg"]
    if first["type"] == "json_invalid":
        place, what = "", f"not JSON at character {place}: {first.get('ctx', {}).get('error', 'malformed')}"
    elif not place and "json" not in request.headers.get("content-type", ""):
        what = "send JSON, with the header `Content-Type: application/json`"
    message = f"{place or 'the body'}: {what}"
    return _response(request, 400, message, param=place or None)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """The response to an unknown path, a wrong method, or a wrong API key."""
    assert isinstance(error, HTTPException)
    message, path = str(error.detail), shown(request.url.path)
    if isinstance(error.__cause__, RecursionError):
        message = "the body: its JSON is nested too deeply"
    if error.status_code == 404:
        message = f"there is nothing at {path}: use /v1/completions or /v1/chat/completions"
    if error.status_code == 405:
        message = f"{path} does not take {request.method}: use {(error.headers or {}).get('Allow')}"
    code = {401: "invalid_api_key", 404: "not_found"}.get(error.status_code)
    return _response(request, error.status_code, message, code=code, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """The response to an unexpected exception. Its traceback is written to stderr."""
    message = f"unexpected {type(error).__name__}, see the server's log"
    return _response(request, 500, message, "server_error")


def _response(
    request: Request,
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    *,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error in the format of the path's API. kind, code, param: for OpenAI's."""
    content = api.failure(message, kind, code, param)
    if request.url.path.startswith(MESSAGES):
        content = messages_failure(message, _MESSAGES_KINDS.get(status, "invalid_request_error"))
    return JSONResponse(content, status, headers)


def messages_failure(message: str, kind: str = "api_error") -> dict[str, Any]:
    """An error in Anthropic's format."""
    return {"type": "error", "error": {"type": kind, "message": message}}
