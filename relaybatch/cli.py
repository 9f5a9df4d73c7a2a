"""The `relaybatch` command: thin over `relaybatch.run`, `plan`, `check` and `schema`.

Standard output carries results for programs (`--json`: one document, last and alone); all else goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from relaybatch import __version__
from relaybatch.errors import RelaybatchError, plain

app = typer.Typer(
    name="relaybatch", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Run a file of instructions through a ladder of language models, each row on the cheapest tier that will do.",
)  # fmt: skip

JobFile = Annotated[Path, typer.Argument(help="Job file (YAML).", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a key of the job; tiers by name: tiers.large.dtype=…"),
]
Var = Annotated[list[str] | None, typer.Option("--var", metavar="NAME=VALUE", help="A {name} variable of its paths.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Nothing on standard error but errors.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Details; tracebacks of internal faults.")]


def _variables(given: list[str] | None) -> dict[str, str]:
    from relaybatch.errors import SpecError

    pairs = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise SpecError(f"--var {text}: write --var name=value")
        pairs[name] = value
    return pairs


@app.command("run")
def run_command(
    job: JobFile, changes: Set = None, variables: Var = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Drop what an earlier run left in the output folder.")] = False,
    as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False,
) -> None:  # fmt: skip
    """Run a job; the same command again resumes it, or says that it is finished."""
    from relaybatch.job import run
    from relaybatch.progress import Progress

    level = -1 if quiet else (1 if verbose else 0)
    result = run(
        job, variables=_variables(variables), changes=changes or [], fresh=fresh, progress=Progress(level=level)
    )
    if not quiet and not result.nothing_to_do:
        from relaybatch.report.terminal import print_bill

        print_bill(result.report, _shown(result.results), sys.stderr)
    if as_json:
        print(result.report.model_dump_json(indent=1))
    if result.exit_code == 3:
        r = result.report
        print(
            f"relaybatch: {r.failed:,} rows failed and {r.rejects:,} lines were rejected, more than `max_failed` allows",
            file=sys.stderr,
        )
    raise typer.Exit(result.exit_code)


@app.command("plan")
def plan_command(
    job: JobFile, changes: Set = None, variables: Var = None, as_json: Json = False, verbose: Verbose = False
) -> None:
    """Show what would go where, at what cost and time; nothing is run or written."""
    from relaybatch.job import plan

    made = plan(job, variables=_variables(variables), changes=changes or [])
    if as_json:
        print(made.model_dump_json(indent=1))
    else:
        from relaybatch.report.terminal import print_plan

        print_plan(made, sys.stdout)


@app.command("check")
def check_command(
    job: JobFile, changes: Set = None, variables: Var = None, as_json: Json = False, verbose: Verbose = False
) -> None:
    """Find every problem of a job at once; no weights are loaded."""
    from relaybatch.job import check

    problems = check(job, variables=_variables(variables), changes=changes or [])
    if as_json:
        print(json.dumps({"problems": problems}, ensure_ascii=False, indent=1))
    else:
        print("\n".join(map(plain, problems)) if problems else f"{job}: no problems found", file=sys.stderr)
    raise typer.Exit(2 if problems else 0)


@app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of job files, for editors."""
    from relaybatch.spec import schema

    print(json.dumps(schema(), ensure_ascii=False, indent=1))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"relaybatch {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)


def main() -> None:
    """Run the command; faults become one message on standard error and an exit code."""
    verbose = any(a in ("-v", "--verbose") for a in sys.argv[1:])
    try:
        app()
    except RelaybatchError as error:
        print(f"relaybatch: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("relaybatch: interrupted; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # the reader of our output went away: nothing more to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        print(
            f"relaybatch: internal fault: {type(error).__name__}: {error}\n"
            "  → finished rows are kept; run again with -v for the traceback, and report it",
            file=sys.stderr,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
