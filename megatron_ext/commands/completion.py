"""``completion``: what a shell needs to complete commands, options and their values."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from .parser import Parser

_SCRIPT = """\
_megatron_ext() {{
    local word path="" cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $word" in
            {commands}) path="$path $word" ;;
        esac
    done
    local hidden="-*" # options, unless one is begun
    if [[ $cur == -* ]]; then hidden=""; fi
    COMPREPLY=()
    case "$path $prev" in
{values}
    esac
    case "$path" in
{words}
    esac
}}
complete -o default -F _megatron_ext megatron-ext
"""


def declare(parser: Parser) -> None:
    """Its one argument."""
    parser.description = (
        "bash: add `source <(megatron-ext completion bash)` to ~/.bashrc; zsh: the same with zsh "
        "in ~/.zshrc, after compinit."
    )
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")
    parser.set_defaults(run=_completion)


def _completion(args: argparse.Namespace) -> None:
    from ..cli import make_parser

    if args.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    (commands,) = _nested(make_parser())
    print(script(commands), end="")


def script(commands: argparse._SubParsersAction[Parser]) -> str:
    """For bash; zsh runs it with its ``bashcompinit``."""
    parsers = dict(_parsers("", commands))
    values, words = [], [_case("", ("--help", "--version", *commands.choices))]
    for path, parser in parsers.items():
        own: list[str] = []
        for action in parser._actions:
            own += action.option_strings or [str(choice) for choice in action.choices or ()]
            for option in action.option_strings:
                known = action.choices or parser.words.get(option)
                if known and action.nargs != 0:
                    values.append(_case(f"{path} {option}", map(str, known), "; return"))
        words.append(_case(path, own))
    return _SCRIPT.format(
        commands=" | ".join(map(shlex.quote, parsers)),
        values="\n".join(values),
        words="\n".join(words),
    )


def _case(pattern: str, words: Iterator[str] | tuple[str, ...] | list[str], end: str = "") -> str:
    found = shlex.quote(" ".join(words))
    made = f'COMPREPLY=($(compgen -W {found} -X "$hidden" -- "$cur"))'
    return f"        {shlex.quote(pattern)}) {made}{end} ;;"


def _parsers(
    path: str, commands: argparse._SubParsersAction[Parser]
) -> Iterator[tuple[str, Parser]]:
    """Every command, and every action of one, with the words that lead to it."""
    for name, parser in commands.choices.items():
        yield f"{path} {name}", parser
        for actions in _nested(parser):
            yield from _parsers(f"{path} {name}", actions)


def _nested(parser: Parser) -> list[argparse._SubParsersAction[Parser]]:
    return [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
