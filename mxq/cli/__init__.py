"""The command line: one file per verb, imported only when that verb runs, so that ``mxq --help`` is instant.

Exit codes are those of :mod:`mxq.errors`; results go to stdout, everything else to stderr.
"""

import importlib
import os
import sys
import traceback
from typing import Any

import click

from mxq import __version__, errors, progress

# verb -> (module in mxq.cli that holds it as ``command``, the line shown by `mxq --help`)
_VERBS = {
    "plan": ("plan", "Show what a conversion would do, tensor by tensor, and write nothing."),
    "quantize": ("quantize", "Convert a bf16 Qwen3.5 checkpoint to MXFP4."),
    "verify": ("verify", "Check a converted checkpoint, against its source if given."),
    "inspect": ("inspect", "Look into a checkpoint: tensors, sizes, what is quantized."),
    "eval": ("eval", "Run targets x methods x budgets x workloads into a run directory."),
}

_EPILOG = """\b
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 verification mismatch or regression, 4 interrupted (run again to resume)

\b
Examples:
  mxq quantize testbed:dense ./dense-mxfp4 --recipe mxfp4
  mxq verify ./dense-mxfp4 --against testbed:dense
  mxq eval --bf16 testbed:dense --mxfp4 ./dense-mxfp4 --spec dflash --out ./run
"""


class _LazyGroup(click.Group):
    """A group that knows its verbs' names and one-line helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _VERBS:
            return None
        command = importlib.import_module(f"mxq.cli.{_VERBS[name][0]}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in _VERBS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        # Options come after the verb as often as before it; the environment variable reaches both.
        debug = bool(ctx.params.get("debug"))
        try:
            return super().invoke(ctx)
        except errors.MxqError as error:
            if debug:
                traceback.print_exc()
            _fail(f"error: {error.message}", error.hint, error.exit_code)
        except KeyboardInterrupt:
            _fail("interrupted", "run the same command again to continue", errors.InterruptedRunError.exit_code)
        except BrokenPipeError:
            # The reader of stdout (head, less) went away: not our failure, and nothing to say it to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(1)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if debug:
                traceback.print_exc()
            _fail(
                f"error: {type(error).__name__}: {error}",
                "this is not an error mxq expects: run `mxq --debug ...` for the traceback and report it",
                1,
            )


def _fail(message: str, hint: str | None, code: int) -> None:
    click.echo(message if hint is None else f"{message}\n  -> {hint}", err=True)
    raise click.exceptions.Exit(code)


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mxq")
@click.option("--debug", is_flag=True, envvar="MXQ_DEBUG", help="Show tracebacks.")
@click.option("--quiet", "-q", is_flag=True, help="No progress and no notes on stderr.")
def main(debug: bool, quiet: bool) -> None:
    """Convert Qwen3.5 models to OCP MXFP4 and measure whether speculative decoding survives."""
    progress.set_quiet(quiet)
