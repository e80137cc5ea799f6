"""The choice `allowed_tools` of requests: some of their tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qcompile.errors import UsageError, shown

Tool = dict[str, Any]


def allowed_tools(tools: Sequence[Tool], names: Any, mode: Any) -> tuple[list[Tool], Any]:
    """The tools of these names, in the form of chat completions, and the choice among them.

    mode: "auto", which None stands for, or "required". Raises UsageError for names that no tool has.
    """
    if mode not in (None, "auto", "required"):
        raise UsageError(f"tool_choice: the mode of allowed_tools must be 'auto' or 'required', not {shown(mode)}")
    known = {tool["function"]["name"] for tool in tools}
    if not isinstance(names, list):
        raise UsageError("tool_choice.tools must be a list of functions by name")
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise UsageError(f"tool_choice.tools has {shown(name)}, which is no function of tools")
    return [tool for tool in tools if tool["function"]["name"] in names], mode or "auto"


def field_of_each(listed: Any, field: str) -> list[Any] | None:
    """A field of each mapping of a list, None where it lacks; None for what is no list of mappings."""
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
        return None
    return [each.get(field) for each in listed]
