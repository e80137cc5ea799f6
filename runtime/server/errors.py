"""Responses to requests that fail, in the format of the API that the request's path belongs to."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from qcompile.errors import BusyError, LongPromptError, OverflowedError, QCompileError, UsageError, shown
from qcompile.runtime.server import api


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
        return JSONResponse(api.failure(str(error), "invalid_request_error", error.code, error.param), 404)
    if isinstance(error, UsageError):
        code = "context_length_exceeded" if isinstance(error, LongPromptError) else None
        return JSONResponse(api.failure(str(error), "invalid_request_error", code), 400)
    if isinstance(error, BusyError):
        return JSONResponse(api.failure(str(error), "rate_limit_error"), 429, {"Retry-After": "1"})
    status = 500 if isinstance(error, OverflowedError) else 503
    return JSONResponse(api.failure(str(error), "server_error"), status)


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
    return JSONResponse(api.failure(message, "invalid_request_error", param=place or None), 400)


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
    content = api.failure(message, "invalid_request_error", code)
    return JSONResponse(content, error.status_code, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """The response to an unexpected exception. Its traceback is written to stderr."""
    return JSONResponse(api.failure(f"unexpected {type(error).__name__}, see the server's log", "server_error"), 500)
