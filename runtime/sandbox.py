"""The sandbox in which chat templates run: they come with a checkpoint, from anybody."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace


class TemplateDict:
    """`dict` of templates: makes dictionaries, and has nothing else of Python's type."""

    def __call__(self, *given: Any, **more: Any) -> dict[Any, Any]:
        return dict(*given, **more)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """A dictionary of these keys, all with the same value."""
        return dict.fromkeys(keys, value)


def _namespace() -> type[Namespace]:
    """`namespace` of templates, without names that begin with an underscore."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r} in templates")

    class TemplateNamespace(Namespace):
        def __init__(*args: Any, **given: Any) -> None:  # the template may name an attribute `self`
            attributes = dict(*args[1:], **given)
            for name in attributes:
                check(name)
            Namespace.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    return TemplateNamespace


def environment() -> ImmutableSandboxedEnvironment:
    """What templates expect: Jinja with transformers' additional functions, filter and tag, and its narrower types."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.nodes import Node, Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here its content is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012, as Jinja declares it

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    def as_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """JSON without the HTML escapes of Jinja's own `tojson`."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.globals |= {"raise_exception": refuse, "strftime_now": now, "dict": TemplateDict(), "namespace": _namespace()}
    made.filters["tojson"] = as_json
    return made
