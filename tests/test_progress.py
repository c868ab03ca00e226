"""Progress where stderr is no terminal."""

import pytest

from mxq import progress


@pytest.mark.parametrize(
    ("total", "unit", "shown"),
    [
        (13_500_000, "B", "converting: 100% (13.5/13.5 MB, "),
        (54e9, "B", "converting: 100% (54.0/54.0 GB, "),
        (12, "requests", "converting: 100% (12/12 requests), "),
    ],
)
def test_the_end_is_always_shown(capsys: pytest.CaptureFixture[str], total: float, unit: str, shown: str) -> None:
    with progress.progress("converting", total, unit) as advance:
        advance(total / 4)
        advance(total * 3 / 4)
    captured = capsys.readouterr()
    assert captured.err.startswith(shown)
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_what_others_wrote_stays_on_its_line_and_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress.note("not copied: a\nb\x1b[2J\u202e\udcff é")
    progress.note("x" * 10_000)
    first, second = capsys.readouterr().err.splitlines()
    assert first == r"not copied: a\nb\x1b[2J\u202e\udcff é"
    assert len(second) == 2003


def test_lines_come_as_time_passes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("mxq.progress.time.monotonic", lambda: clock[0])
    with progress.progress("arithmetic", 4, "requests") as advance:
        for _ in range(4):
            clock[0] += 15
            advance(1, "chat")
    assert capsys.readouterr().err.splitlines() == [
        "chat:  25% (1/4 requests), 15 s, 45 s left",
        "chat:  50% (2/4 requests), 30 s, 30 s left",
        "chat:  75% (3/4 requests), 45 s, 15 s left",
        "chat: 100% (4/4 requests), 60 s, 0 s left",
    ]


def test_nothing_to_do_or_quiet_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.progress("converting", 0, "B") as advance:
        advance(0)
    monkeypatch.setattr(progress, "_quiet", True)
    with progress.progress("converting", 1, "B") as advance:
        advance(1)
    progress.note("a note")
    assert capsys.readouterr().err == ""
