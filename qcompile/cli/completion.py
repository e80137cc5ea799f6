"""The command `completion`: scripts by which a shell completes commands, options and their values.

A script holds all words, so that completing starts no Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from qcompile.cli.options import command
from qcompile.cli.pass_fields import pass_fields
from qcompile.errors import UsageError, suggestion
from qcompile.recipes import EMBEDDINGS, HEADS, RECIPES
from qcompile.targets import TARGET_NAMES


@command
def completion(shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell.")]) -> None:
    """Print a script that lets a shell complete commands, options, recipes, targets and passes.

    \b
    Example:
      qcompile completion bash > ~/.local/share/bash-completion/completions/qcompile
      qcompile completion zsh > ~/.zfunc/_qcompile
      qcompile completion fish > ~/.config/fish/completions/qcompile.fish
    """
    if shell not in _SCRIPTS:
        raise UsageError(f"{shell}: there are scripts for {', '.join(_SCRIPTS)}{suggestion(shell, _SCRIPTS)}")
    print(_SCRIPTS[shell](list(_nodes())))


@dataclass(frozen=True)
class _Option:
    """An option with its names, what it does, and its values; None if it is a flag, empty if they may be anything."""

    names: tuple[str, ...]
    about: str
    values: tuple[str, ...] | None


@dataclass(frozen=True)
class _Node:
    """A command by the words that lead to it, what it does, its subcommands and options, and words for arguments."""

    path: tuple[str, ...]
    about: str
    commands: tuple[str, ...]
    options: tuple[_Option, ...]
    arguments: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """The names of all its options."""
        return [name for option in self.options for name in option.names]


def _nodes() -> Iterator[_Node]:
    """The command itself, then its subcommands and theirs."""
    from qcompile.__main__ import app

    fields = pass_fields()
    known: dict[str, Sequence[str]] = {
        "--recipe": tuple(RECIPES),
        "--target": TARGET_NAMES,
        "--head-dtype": tuple(HEADS),
        "--embedding-dtype": tuple(EMBEDDINGS),
        "--explain": tuple(fields),
        "--set": [f"{name}.{field}=" for name in fields for field in fields[name]],
    }
    root: Any = typer.main.get_command(app())
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:
        path, node = waiting.pop(0)
        commands = getattr(node, "commands", {})
        waiting += [((*path, name), inner) for name, inner in commands.items()]
        options = [_option(one, known) for one in node.params if one.param_type_name == "option"]
        words = [word for one in node.params if one.param_type_name == "argument" for word in _words(one.metavar)]
        yield _Node(path, _sentence(node.help), tuple(commands), (*options, _HELP), tuple(words))


def _option(option: Any, known: Mapping[str, Sequence[str]]) -> _Option:
    names = (*option.opts, *option.secondary_opts)
    values = next((tuple(known[name]) for name in names if name in known), tuple(_words(option.metavar)))
    return _Option(names, _sentence(option.help), None if option.is_flag else values)


_HELP = _Option(("--help",), "Show what the command does, and its options.", None)


def _words(metavar: str | None) -> list[str]:
    """The choices in `auto|cpu|gpu`; `N|auto` has the choice `auto`."""
    parts = (metavar or "").split("|")
    return [part for part in parts if len(parts) > 1 and re.fullmatch(r"[a-z][a-z0-9-]*", part)]


def _sentence(text: str | None) -> str:
    """The first sentence of a help text, without characters that shells read."""
    first = re.split(r"(?<=\w)[.:;] |\n", text or "", maxsplit=1)[0]
    return re.sub(r"""[^\w ,./()<>=*-]""", "", first.rstrip("."))


# ---- scripts -------------------------------------------------------------------------------------------


def _bash(nodes: Sequence[_Node]) -> str:
    """For bash: a function that finds the command that the command line names, and offers the words of this command."""
    paths = " | ".join(f'"{" ".join(node.path)}"' for node in nodes if node.path)
    return f"""# bash completion of qcompile; made by `qcompile completion bash`
_qcompile() {{
    local word path="" words="" current="${{COMP_WORDS[COMP_CWORD]}}"
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "${{path:+$path }}$word" in
            {paths}) path="${{path:+$path }}$word" ;;
        esac
    done
    case "$path ${{COMP_WORDS[COMP_CWORD-1]}}" in
{_cases(_valued(nodes), '            words="{}" ;;')}
        *) case "$path" in
{_cases(_plain(nodes), '            words="{}" ;;')}
        esac ;;
    esac
    [[ "$current" == -* ]] || {{ words=" $words"; words="${{words%% -*}}"; }}
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace
}}
complete -o default -F _qcompile qcompile"""


def _zsh(nodes: Sequence[_Node]) -> str:
    """For zsh, in the same way."""
    paths = " | ".join(f'"{" ".join(node.path)}"' for node in nodes if node.path)
    return f"""#compdef qcompile
# zsh completion of qcompile; made by `qcompile completion zsh`
_qcompile() {{
    local word given="" path_words=""
    local -a offered
    for word in ${{words[2,CURRENT-1]}}; do
        case "${{path_words:+$path_words }}$word" in
            ({paths}) path_words="${{path_words:+$path_words }}$word" ;;
        esac
    done
    case "$path_words ${{words[CURRENT-1]}}" in
{_cases(_valued(nodes), "            offered=({}) ;;", "(")}
        (*) case "$path_words" in
{_cases(_plain(nodes), "            offered=({}) ;;", "(")}
        esac ;;
    esac
    [[ "$PREFIX" == -* ]] || offered=(${{offered:#-*}})
    [[ "${{offered[1]}}" == *= ]] && compadd -S '' -a offered || compadd -a offered || _files
}}
if [[ "$funcstack[1]" == _qcompile ]]; then _qcompile "$@"; else compdef _qcompile qcompile; fi"""


def _fish(nodes: Sequence[_Node]) -> str:
    """For fish: a line for each command and option, with the command after which fish offers it."""
    lines = ["# fish completion of qcompile; made by `qcompile completion fish`"]
    for node in nodes:
        inner = " ".join(node.commands)
        seen = [f"__fish_seen_subcommand_from {word}" for word in node.path]
        none = f"not __fish_seen_subcommand_from {inner}" if inner else ""
        here = "; and ".join(part for part in (*seen, none) if part)
        for name in node.commands:
            about = next(one.about for one in nodes if one.path == (*node.path, name))
            lines.append(f"complete -c qcompile -f -n '{here}' -a {name} -d '{about}'")
        if node.arguments:
            lines.append(f"complete -c qcompile -f -n '{here}' -a '{' '.join(node.arguments)}'")
        for option in node.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            values = "" if option.values is None else f" -x -a '{' '.join(option.values)}'" if option.values else " -r"
            lines.append(f"complete -c qcompile -n '{here}' {names}{values} -d '{option.about}'")
    return "\n".join(lines)


def _valued(nodes: Sequence[_Node]) -> Iterator[tuple[str, str]]:
    """What may follow an option of a command that takes a value: nothing is offered, so files are, where it is free."""
    for node in nodes:
        for option in node.options:
            if option.values is not None:
                places = "|".join(f'"{" ".join(node.path)} {name}"' for name in option.names)
                yield places, " ".join(option.values)


def _plain(nodes: Sequence[_Node]) -> Iterator[tuple[str, str]]:
    """What may stand anywhere after a command."""
    for node in nodes:
        yield f'"{" ".join(node.path)}"', " ".join((*node.commands, *node.arguments, *node.flags))


def _cases(cases: Iterator[tuple[str, str]], line: str, opening: str = "") -> str:
    """Branches of a shell's case statement."""
    return "\n".join(f"        {opening}{pattern}) {line.format(words).strip()}" for pattern, words in cases)


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
