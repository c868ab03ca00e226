"""What is said of an evaluation on its way: seldom, and with an estimate of what is left."""

import pytest

from mxq.evaluate.meter import Meter


def test_what_is_left_is_requests_and_starts(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    meter = Meter(100, 3, 1, clock=lambda: now[0])
    with meter.starting():
        now[0] += 40
    with meter.measuring():
        now[0] += 5
        meter.advance(9, "cell 1/2: a")  # within ten seconds of the last line, but the first one is due
        now[0] += 5
        meter.advance(1, "cell 1/2: a")
        assert len(capsys.readouterr().err.splitlines()) == 1
        now[0] += 10
        meter.advance(10, "cell 1/2: a")
    # A second for each of 80 requests, and 40 s for each of two servers.
    assert capsys.readouterr().err == "cell 1/2: a:  20% (20/100 requests), 60 s, about 160 s left\n"
    meter.advance(-10, "cell 1/2: a")
    assert capsys.readouterr().err == ""


def test_places_share_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    meter = Meter(40, 0, 2, clock=lambda: now[0])
    with meter.measuring(), meter.measuring():
        now[0] += 10
        meter.advance(20, "a")
    assert "50% (20/40 requests), 10 s, about 10 s left" in capsys.readouterr().err
    meter.advance(20, "b")
    assert "100% (40/40 requests)" in capsys.readouterr().err
