"""The process in which chat templates run and grammars are tried: both come from anybody.

This file is the process's program: it imports nothing of qcompile, as the process must start in little time and memory.
It reads requests, each a line of JSON, from its standard input, and writes a line of JSON for each:

    {"templates": {name: source}}                            the first request -> {}
    {"reads": true}                                          -> {"names": [variable, ...]}
    {"render": name, "values": {...}, "most": characters}    -> {"text": "..."}

    {"grammar": llguidance's grammar, "limits": {...}}       -> {"problem": message, empty without one}

or `{"error": message}`. `sandboxed.py` starts it and gives it its limits.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template
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


class Templates:
    """The templates of a model: compiled when they are first used, as a long one takes as long as many steps."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources
        self._compiled: dict[str, Template] = {}

    def reads(self) -> list[str]:
        """The names of the variables that the templates read."""
        from jinja2 import meta

        parse = environment().parse
        trees = [parse(source) for source in self._sources.values()]
        return sorted(set().union(*map(meta.find_undeclared_variables, trees)))

    def render(self, name: str, values: dict[str, Any], most: int) -> str:
        """The text of a template. Raises ValueError for more than `most` characters."""
        if name not in self._compiled:
            self._compiled[name] = environment().from_string(self._sources[name])
        parts, size = [], 0
        for part in self._compiled[name].generate(values):
            parts.append(part)
            size += len(part)
            if size > most:
                raise ValueError(f"its text has more than {most:,} characters")
        return "".join(parts)


def _answer(templates: Templates, asked: dict[str, Any]) -> dict[str, Any]:
    if "grammar" in asked:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**asked["limits"])
        return {"problem": LLMatcher.validate_grammar(asked["grammar"], None, limits=limits)}
    if "reads" in asked:
        return {"names": templates.reads()}
    return {"text": templates.render(asked["render"], asked["values"], asked["most"])}


def _limit(memory: int) -> None:
    """Let the process take `memory` more bytes, and write no file."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    for files in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(files, (0, 0))


def main(memory: int, seconds: int) -> None:
    """Answer requests until the input ends. memory: bytes; seconds: CPU time of a request, after which it is killed."""
    from jinja2 import meta  # noqa: F401  # before the limits: a request should not pay for it

    environment().from_string("{{ 0 }}").render()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    templates = Templates({})
    _limit(memory)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 1, hard))
        try:
            asked = json.loads(line)
            if "templates" in asked:
                templates = Templates(asked["templates"])
                answer: dict[str, Any] = {}
            else:
                answer = _answer(templates, asked)
            written = json.dumps(answer)
        except MemoryError:
            written = json.dumps({"error": f"it needs more than {memory >> 20} MiB of memory"})
        except Exception as error:  # a template can raise whatever Python's operators raise
            written = json.dumps({"error": f"{error}" or type(error).__name__})
        sys.stdout.write(written + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
