"""Generate the manual pages and the shell completions from the commands and settings themselves; `make install` does.

usage: tools/manual.py DIRECTORY       writes man1/ man5/ man8/ bash/ zsh/ fish/ into it
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click
from click.shell_completion import get_completion_class
from singularityd import __version__, config_reference
from singularityd.__main__ import EXIT_CODES, command
from singularityd.config_changes import is_reloadable
from singularityd.ctl.failures import EXIT_CODES as CTL_EXIT_CODES
from singularityd.ctl.main import cli
from singularityd.ctl.output import WIDTH

PROGRAMS: dict[str, tuple[int, click.Group, Mapping[int, str]]] = {
    "singularityctl": (1, cli, CTL_EXIT_CODES),
    "singularityd": (8, command, EXIT_CODES),
}
SHELLS = {"bash": "{0}", "zsh": "_{0}", "fish": "{0}.fish"}

_FILES = {
    "/etc/singularityd/config.toml": "Settings; see singularityd.toml(5).",
    "/etc/singularityd/conf.d/*.toml": "More of them, by name, over the file's.",
    "/run/singularityd/control.sock": "For singularityctl(1).",
    "/run/singularityd/agent.sock": "For ranks.",
    "/var/lib/singularityd": "The journal of faults, what is known of ranks, prepared kernel headers.",
}
_SETTINGS = """\
TOML. Later wins: the defaults, config.toml, conf.d/*.toml beside it by name, the environment, flags. A duration is a number of seconds or a
text with its unit: "500ms", "10s", "2m". An unknown key is an error. Settings marked "reload" change by SIGHUP, the others by a restart;
"singularityd config show --origin" prints those in force."""
_SIGNALS = {
    "SIGTERM, SIGINT": "End: faults are ended, held ranks go on, probes are taken away.",
    "SIGHUP": "Read the settings again. Where one is wrong the old ones stay in force, and the log lists every problem.",
}
_VARIABLES = {
    "SINGULARITYD_CONFIG": "Names the file of settings where no flag does.",
    "SINGULARITYD_RUNTIME_DIR": "The setting daemon.runtime_dir; singularityctl finds the control socket by it.",
    "SINGULARITYD_STATE_DIR": "The setting daemon.state_dir.",
}
_CTL_VARIABLES = {
    "SINGULARITYD_RUNTIME_DIR": "Directory of the control socket.",
    "SINGULARITYD_DEBUG": "1: show the traceback of any failure.",
    "NO_COLOR": "No bold.",
}


def roff(text: str) -> str:
    """Text with nothing in it that troff would take as its own."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "")
    return re.sub(r"(?m)^([.'])", r"\\&\1", text)


def paragraphs(help_text: str) -> Iterator[str]:
    """click's help: paragraphs, those after \\b as they stand."""
    for part in re.split(r"\n\s*\n", help_text.strip()):
        if part.lstrip().startswith("\b"):
            yield f".PP\n.nf\n{roff(part.lstrip()[1:].strip(chr(10)))}\n.fi"
        else:
            yield f".PP\n{roff(' '.join(part.split()))}"


def terms(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A list of words with what they mean."""
    for term, meaning in pairs:
        yield f".TP\n\\fB{roff(term)}\\fR\n{roff(' '.join(meaning.split()))}"


def options(ctx: click.Context, cmd: click.Command) -> Iterator[str]:
    """Every option with its help."""
    records = (param.get_help_record(ctx) for param in cmd.get_params(ctx))
    return terms(record for record in records if record is not None)


def commands(ctx: click.Context, group: click.Group, outer: str = "") -> Iterator[str]:
    """A subsection a command, those inside others too."""
    for name in group.list_commands(ctx):
        cmd = group.commands[name]
        if cmd.hidden:
            continue
        inner = click.Context(cmd, info_name=name, parent=ctx, terminal_width=WIDTH)
        if isinstance(cmd, click.Group):
            yield from commands(inner, cmd, f"{outer}{name} ")
            continue
        usage = " ".join(cmd.collect_usage_pieces(inner))
        yield f".SS {roff(f'{outer}{name} {usage}')}"
        yield from paragraphs(cmd.help or "")
        yield from options(inner, cmd)


def header(name: str, section: int, about: str) -> str:
    """The first lines of every page. No date: the same source gives the same page."""
    title = f'.TH {name.upper()} {section} "" "singularityd {__version__}"'
    return f'.\\" made by tools/manual.py\n{title}\n.SH NAME\n{roff(name)} \\- {roff(about)}'


def program_page(name: str) -> str:
    """The page of one of the two programs."""
    section, root, codes = PROGRAMS[name]
    ctx = click.Context(root, info_name=name, **{**root.context_settings, "terminal_width": WIDTH})
    about, _, rest = (root.help or "").partition("\n\n")
    parts = [
        header(name, section, " ".join(about.split()).rstrip(".")),
        ".SH SYNOPSIS",
        f"\\fB{name}\\fR {roff(' '.join(root.collect_usage_pieces(ctx)))}",
    ]
    kept = "\n\n".join(part for part in rest.split("\n\n") if "Exit codes" not in part)
    parts += [".SH DESCRIPTION", roff(" ".join(about.split())), *(paragraphs(kept) if kept.strip() else ())]
    parts += [".SH OPTIONS", *options(ctx, root), ".SH COMMANDS", *commands(ctx, root)]
    parts += [".SH EXIT STATUS", *terms((str(code), meaning) for code, meaning in codes.items())]
    if section == 8:
        parts += [".SH SIGNALS", *terms(_SIGNALS.items()), ".SH FILES", *terms(_FILES.items())]
    parts += [".SH ENVIRONMENT", *terms((_VARIABLES if section == 8 else _CTL_VARIABLES).items())]
    others = sorted({"singularityctl(1)", "singularityd(8)", "singularityd.toml(5)"} - {f"{name}({section})"})
    return "\n".join([*parts, ".SH SEE ALSO", roff(", ".join(others))]) + "\n"


def settings_page() -> str:
    """singularityd.toml(5)."""
    parts = [
        header("singularityd.toml", 5, "settings of singularityd"),
        ".SH DESCRIPTION",
        roff(_SETTINGS),
    ]
    for table, about, fields in config_reference.tables():
        parts += [f".SH [{roff(table)}]", roff(about)]
        for field in fields:
            allowed = config_reference.allowed(field).replace("`", "")
            when = "reload" if is_reloadable(table, field.name) else "restart"
            default = config_reference.toml(field.kind, field.default)
            parts += terms([(f"{field.name} = {default}", f"{field.help} Allowed: {allowed}. ({when})")])
    return "\n".join([*parts, ".SH SEE ALSO", roff("singularityd(8)")]) + "\n"


def completion(name: str, shell: str) -> str:
    """The script of one program for one shell; it asks the program itself, so it never goes stale."""
    kind = get_completion_class(shell)
    assert kind is not None, "click completes these"
    variable = f"_{name.upper()}_COMPLETE"
    completer = kind(PROGRAMS[name][1], {}, name, variable)
    return completer.source_template % completer.source_vars()


def main(directory: Path) -> None:
    """Write all of them."""
    pages = {f"man{section}/{name}.{section}": program_page(name) for name, (section, *_) in PROGRAMS.items()}
    pages["man5/singularityd.toml.5"] = settings_page()
    for shell, pattern in SHELLS.items():
        pages |= {f"{shell}/{pattern.format(name)}": completion(name, shell) for name in PROGRAMS}
    for place, text in pages.items():
        path = directory / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: tools/manual.py DIRECTORY")
    main(Path(sys.argv[1]))
