"""What every verb has in common: exit codes, one-line errors, help with examples, --debug and --quiet."""

import errno
import importlib
import os
import subprocess
import sys
import types

import click
import pytest
from click.testing import CliRunner, Result

from mxq import __version__, cli, errors, progress


def invoke(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli.main, arguments, env=env)


@pytest.fixture
def failing_verb(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The verb `fail`, which raises what the list holds."""
    to_raise: list[BaseException] = []

    @click.command("fail")
    def command() -> None:
        progress.note("working")
        for error in to_raise:
            raise error

    module = types.ModuleType("mxq.cli.fail")
    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mxq.cli.fail", module)
    monkeypatch.setitem(cli._VERBS, "fail", ("fail", "Fail."))
    return to_raise


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (errors.MxqError("disk.bin is torn", "copy it again"), 1, "error: disk.bin is torn\n  -> copy it again\n"),
        (errors.UsageError("K is 0"), 2, "error: K is 0\n"),
        (errors.MismatchError("2 tensors differ"), 3, "error: 2 tensors differ\n"),
        (errors.InterruptedRunError("stopped", "run it again"), 4, "error: stopped\n  -> run it again\n"),
        (KeyboardInterrupt(), 4, "interrupted\n  -> run the same command again\n"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.bin"), 1, "error: No space left on device: x.bin\n"),
        (ValueError("odd"), 1, "error: ValueError: odd\n  -> mxq did not expect this: run it again with --debug"),
    ],
)
def test_an_error_is_a_line_and_an_exit_code(
    failing_verb: list[BaseException], error: BaseException, code: int, stderr: str
) -> None:
    failing_verb.append(error)
    result = invoke("fail")
    assert result.exit_code == code
    assert result.stderr.removeprefix("working\n").startswith(stderr)
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "env"), [(["--debug", "fail"], {}), (["fail", "--debug"], {}), (["fail"], {"MXQ_DEBUG": "1"})]
)
def test_debug_shows_the_traceback(
    failing_verb: list[BaseException], arguments: list[str], env: dict[str, str]
) -> None:
    failing_verb.append(errors.MismatchError("2 tensors differ"))
    result = invoke(*arguments, env=env)
    assert result.exit_code == 3
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("error: 2 tensors differ\n")


def test_quiet_silences_notes_before_and_after_the_verb(failing_verb: list[BaseException]) -> None:
    assert invoke("--quiet", "fail").stderr == ""
    assert invoke("fail", "-q").stderr == ""
    assert invoke("fail").stderr == "working\n"


@pytest.mark.parametrize(
    ("typed", "meant"), [("quantise", "quantize"), ("evl", "eval"), ("verfy", "verify"), ("dequantise", "dequantize")]
)
def test_an_unknown_verb_suggests_the_nearest(typed: str, meant: str) -> None:
    result = invoke(typed)
    assert result.exit_code == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in result.stderr


def test_an_unknown_option_is_wrong_usage() -> None:
    result = invoke("quantize", "--recipee", "mxfp4")
    assert result.exit_code == 2
    assert "--recipe" in result.stderr


@pytest.mark.parametrize(
    ("line", "said", "where"),
    [
        (["plan", "x", "--experts", "some"], "'some' is not one of 'per-expert', 'fused'.", "mxq plan"),
        (["layout", "export"], "Missing argument 'MODEL'.", "mxq layout export"),
    ],
)
def test_wrong_usage_is_a_line_and_where_to_look(line: list[str], said: str, where: str) -> None:
    result = CliRunner().invoke(cli.main, line, prog_name="mxq")
    first, second = result.stderr.splitlines()
    assert result.exit_code == 2
    assert first.startswith("error: ")
    assert first.endswith(said)
    assert second == f"  -> see {where} --help"


def test_no_verb_shows_the_help() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert all(verb in result.output for verb in cli._VERBS)


def test_help_names_every_exit_code_and_verb() -> None:
    text = " ".join(invoke("--help").stdout.split())
    assert "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 verification mismatch or regression, 4 interrupted" in text
    for _, line in cli._VERBS.values():
        assert line in text


def commands(verb: str) -> list[list[str]]:
    """The words of a verb, and of those below it."""
    command = importlib.import_module(f"mxq.cli.{cli._VERBS[verb][0]}").command
    return [[verb], *([verb, name] for name in getattr(command, "commands", ()))]


@pytest.mark.parametrize("verb", cli._VERBS)
def test_every_verb_explains_itself_with_examples(verb: str) -> None:
    for words in commands(verb):
        result = invoke(*words, "--help")
        assert result.exit_code == 0
        assert "Example" in result.stdout
        assert f"mxq {' '.join(words)} " in result.stdout.partition("Example")[2]
        is_group = len(commands(verb)) > 1 and words == [verb]
        for shared in ("--debug", "--quiet", "--help", *(["--json"] if not is_group else [])):
            assert shared in result.stdout


@pytest.mark.parametrize("verb", [None, *cli._VERBS])
def test_help_fits_a_terminal_of_80_columns(verb: str | None) -> None:
    for words in [[]] if verb is None else commands(verb):
        assert [line for line in invoke(*words, "--help").stdout.splitlines() if len(line) > 80] == []


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "mxq", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"mxq, version {__version__}\n"
