"""The OpenAPI schema of the server at /openapi.json, and a page that shows it at /docs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel

from qcompile.runtime.server.answers import Failure

Schema = Mapping[str, Any]
_READ = ["GET", "HEAD"]
_POLICY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #8886; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8883; }
td { overflow-wrap: anywhere; }
"""


def answered(
    answer: type[BaseModel] | None, failure: type[BaseModel] = Failure, *, streams: bool = False, text: str = ""
) -> dict[str, Any]:
    """What a route tells of its answers: the arguments of FastAPI's decorators.

    answer: None for the media type `text`. streams: whether it may be a stream of events instead.
    """
    done: dict[str, Any] = {"description": "Done; with `stream: true`, events" if streams else "Done"}
    if answer is not None:
        done["model"] = answer
    if streams or text:
        done["content"] = {"text/event-stream" if streams else text: {}}
    return {"responses": {200: done, "4XX": {"model": failure, "description": "Refused"}}}


def add_schema(app: FastAPI) -> None:
    """Serve the schema of all routes at /openapi.json, and at /docs a page of it that needs no network."""

    async def schema() -> JSONResponse:
        return JSONResponse(await run_in_threadpool(app.openapi))

    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(await run_in_threadpool(app.openapi)), headers=_POLICY)

    app.api_route("/openapi.json", methods=_READ, include_in_schema=False)(schema)
    app.api_route("/docs", methods=_READ, include_in_schema=False)(docs)


def docs_page(schema: Schema) -> str:
    """The schema as HTML: endpoints with the fields of their requests and answers, then the types of the fields."""
    title = f"{schema['info']['title']} {schema['info']['version']}"
    begin = f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{escape(title)}: API</title>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return "\n".join([begin, view, f"<style>{_STYLE}</style><body><main>", *_body(schema, title), "</main></html>"])


def _body(schema: Schema, title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield '<p>The machine-readable form is <a href="openapi.json">openapi.json</a>.</p>'
    for path, methods in schema["paths"].items():
        for method, told in methods.items():
            if method == "head":
                continue
            yield f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(told.get('description', ''))}</p>"
            for name, place in (("Request", told.get("requestBody")), ("Answer", told["responses"].get("200"))):
                content = (place or {}).get("content", {}).get("application/json", {}).get("schema")
                if content:
                    yield f"<p>{name}: {_type(content)}</p>"
    for name, part in schema.get("components", {}).get("schemas", {}).items():
        yield f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(part.get("description", ""))}</p>'
        if "properties" in part:
            yield "<table><tr><th>field<th>type<th>default"
            for field, what in part["properties"].items():
                default = "required" if field in part.get("required", ()) else str(what.get("default", ""))
                yield f"<tr><td><code>{escape(field)}</code><td>{_type(what)}<td>{escape(default)}"
            yield "</table>"


def _type(what: Schema) -> str:
    """A type as HTML, with links to those that have a name."""
    if "$ref" in what:
        name = escape(what["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for word in ("anyOf", "oneOf"):
        if word in what:
            return " or ".join(dict.fromkeys(map(_type, what[word])))
    if "const" in what or "enum" in what:
        return " or ".join(escape(repr(value)) for value in what.get("enum", [what.get("const")]))
    if what.get("type") == "array":
        return f"list of ({_type(what.get('items', {}))})"
    return escape(str(what.get("type", "any")))
