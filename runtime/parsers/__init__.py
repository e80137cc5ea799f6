"""Parsers of replies: what a model writes, as content, reasoning and tool calls, while it is written."""
