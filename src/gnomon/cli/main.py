"""The `gnomon` command.

In:  a command line.
Out: exit code 0; 2 for a wrong command line, model or configuration, said in one line; 1 for what
     failed later. No traceback for anything that a user can cause.
Every command is a module with `register(app)`; importing it is cheap, torch comes when it runs.
Not here: what the commands do.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import typer

import gnomon
from gnomon.cli.flags import refuse_foreign_flags
from gnomon.errors import ConfigError, GnomonError, UnsupportedError

COMMANDS = (
    "serve",
    "chat",
    "generate",
    "verify",
    "evaluate",
    "explain",
    "replay",
    "bench",
    "plan",
    "env",
)

USAGE_ERROR = 2
FAILURE = 1


def build_app() -> typer.Typer:
    """The typer application with all commands."""
    app = typer.Typer(
        name="gnomon",
        help="Serve DeepSeek Sparse Attention models, and check every fast route on your machine.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", help="Print the version and exit.", is_eager=True
        ),
    ) -> None:
        if version:
            print(f"gnomon {gnomon.__version__}")
            raise typer.Exit

    for name in COMMANDS:
        if find_spec(f"gnomon.cli.{name}") is not None:
            import_module(f"gnomon.cli.{name}").register(app)
    return app


def main() -> None:
    """Entry point of the `gnomon` script."""
    try:
        refuse_foreign_flags(sys.argv[1:])
        build_app()(prog_name="gnomon")
    except (ConfigError, UnsupportedError) as error:
        sys.exit(complain(error, USAGE_ERROR))
    except GnomonError as error:
        sys.exit(complain(error, FAILURE))


def complain(error: GnomonError, code: int) -> int:
    """Say what went wrong on stderr; the exit code."""
    print(f"gnomon: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
