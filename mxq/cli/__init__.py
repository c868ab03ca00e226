"""The command line: one file per verb, imported only when that verb runs, so that ``mxq --help`` is instant.

Exit codes are those of :mod:`mxq.errors`; results go to stdout, everything else to stderr.
"""

import contextlib
import difflib
import importlib
import signal
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import click

from mxq import __version__, errors, progress
from mxq.cli import streams

# verb -> (module in mxq.cli that holds it as ``command``, the line shown by `mxq --help`)
_VERBS = {
    "plan": ("plan", "Show what a conversion would do, tensor by tensor, and write nothing."),
    "quantize": ("quantize", "Convert a bf16 Qwen3.5 checkpoint to MXFP4."),
    "verify": ("verify", "Check a converted checkpoint, against its source if given."),
    "dequantize": ("dequantize", "Write an MXFP4 checkpoint's weights as bf16."),
    "layout": ("layout", "Write, undo or check the byte orders that AITER's kernels read."),
    "inspect": ("inspect", "Look into a checkpoint: tensors, sizes, what is quantized."),
    "sensitivity": ("sensitivity", "Measure what each part, quantized by itself, does to the output."),
    "doctor": ("doctor", "Say what is installed, set and known to go wrong; read a server's log."),
    "eval": ("eval", "Run targets x methods x budgets x workloads into a run directory."),
    "compare": ("compare", "Say with intervals whether acceptance and speed are preserved."),
    "predict": ("predict", "Predict speed on other hardware, or project a measured run onto it."),
    "report": ("report", "Write what runs say as one page, with verdict, tables and pictures."),
    "serve": ("serve", "Start vLLM as the published runs did, or print the command."),
}

_EPILOG = """\b
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 verification mismatch or
regression, 4 interrupted (run again to resume), 143 the same by SIGTERM

\b
Examples:
  mxq quantize testbed:dense ./dense-mxfp4 --recipe mxfp4
  mxq verify ./dense-mxfp4 --against testbed:dense
  mxq dequantize ./dense-mxfp4 ./dense-simulated
  mxq eval --bf16 testbed:dense --mxfp4 ./dense-mxfp4 --spec mtp --out ./run
  mxq compare ./run
"""


class _LazyGroup(click.Group):
    """A group that knows its verbs' names and one-line helps without importing them."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        streams.prepare()
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _VERBS:
            return None
        command = importlib.import_module(f"mxq.cli.{_VERBS[name][0]}").command
        assert isinstance(command, click.Command)
        # People add --debug to the end of the line that has just failed, so it is understood there too.
        for one in (command, *(command.commands.values() if isinstance(command, click.Group) else ())):
            one.params += [option for option in _EVERYWHERE if option not in one.params]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            nearest = difflib.get_close_matches(error.command_name, _VERBS, n=1)
            raise click.NoSuchCommand(error.command_name, possibilities=nearest, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in _VERBS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _sigterm_interrupts(ctx):
                return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:  # in the form of all others
            path = ctx.command_path if error.ctx is None else error.ctx.command_path
            _fail(ctx, f"error: {error.format_message()}", f"see {path} --help", error.exit_code)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise  # click knows what to do
        except errors.MxqError as error:
            _fail(ctx, f"error: {error.message}", error.hint, error.exit_code)
        except KeyboardInterrupt:
            _fail(ctx, "interrupted", "run the same command again", errors.InterruptedRunError.exit_code)
        except OSError as error:
            where = f": {error.filename}" if error.filename is not None else ""
            _fail(ctx, f"error: {error.strerror or error}{where}", None, 1)
        except Exception as error:
            _fail(ctx, f"error: {type(error).__name__}: {error}", _UNEXPECTED, 1)


_UNEXPECTED = "mxq did not expect this: run it again with --debug and report the traceback"


def _fail(ctx: click.Context, message: str, hint: str | None, code: int) -> NoReturn:
    if ctx.meta.get(_DEBUG):
        traceback.print_exc()
    click.echo(progress.printable(message), err=True)
    if hint is not None:
        click.echo(f"  -> {progress.printable(hint)}", err=True)
    raise click.exceptions.Exit(_TERMINATED if ctx.meta.get(_TERMINATED_KEY) else code)


@contextlib.contextmanager
def _sigterm_interrupts(ctx: click.Context) -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, with an exit code of its own."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to the end: a second one must not break off the cleaning up
        ctx.meta[_TERMINATED_KEY] = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if not ctx.meta.get(_TERMINATED_KEY):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _remember_debug(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().meta[_DEBUG] = True


def _be_quiet(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value or ctx.parent is None:  # not given after the verb says nothing; not given before it means no
        progress.set_quiet(value)


_DEBUG = "mxq.debug"
_TERMINATED_KEY = "mxq.terminated"
_TERMINATED = 128 + signal.SIGTERM
_EVERYWHERE = [
    click.Option(
        ["--debug"],
        is_flag=True,
        envvar="MXQ_DEBUG",
        expose_value=False,
        callback=_remember_debug,
        help="Show tracebacks.",
    ),
    click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=_be_quiet,
        help="No progress and no notes on stderr.",
    ),
]


@click.group(
    cls=_LazyGroup,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="VERB [ARGS]...",
    params=[*_EVERYWHERE],
)
@click.version_option(__version__, prog_name="mxq")
def main() -> None:
    """Convert Qwen3.5 models to OCP MXFP4 and measure whether speculative decoding survives."""
