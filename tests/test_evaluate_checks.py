"""Checks of a cell: a sound one passes all of them, and each planted defect is found by the check that is for it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from served import ServedCell, served

from mxq.evaluate.checks import Check, check_cell

K = 3
Defect = Callable[[ServedCell], None]


def checked(cell: ServedCell, **facts: Any) -> dict[str, Check]:
    made = check_cell(cell.records, cell.k, cell.concurrency, cell.facts | facts)
    assert len({check.name for check in made}) == len(made)
    return {check.name: check for check in made}


def without_passes(cell: ServedCell) -> ServedCell:
    """As a server tells it that does not give each pass."""
    cell.records = [replace(record, accepted=None, drafted=None) for record in cell.records]
    return cell


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("k", [0, K, 15])
def test_a_sound_cell_passes_every_check(k: int, concurrency: int) -> None:
    made = checked(served(k, concurrency=concurrency))
    assert [check for check in made.values() if check.ok is not True] == []
    assert {"requests", "output tokens", "token ids", "wall clock"} <= made.keys()
    assert ("accepted by position" in made) == bool(k)


def test_counters_alone_are_checked_where_passes_are_not_known() -> None:
    made = checked(without_passes(served(K)))
    assert all(check.ok for check in made.values())
    assert "tokens of the passes" in made
    assert "accepted drafts" not in made


def test_what_cannot_be_checked_is_neither_right_nor_wrong() -> None:
    made = checked(served(K), counters=None, counters_missing="the server has no /metrics")
    assert made["server counters"] == Check("server counters", None, "the server has no /metrics")
    assert not made["server counters"].failed
    assert made["drafts are accepted"].ok
    assert checked(without_passes(served(K)), counters=None)["drafts are accepted"].ok is None


def test_records_of_this_process_have_no_counters_to_agree_with() -> None:
    cell = served(K)
    records = [replace(record, arrivals_s=None) for record in cell.records]
    assert {c.name: c.ok for c in check_cell(records, K)} == {
        "token ids": True,
        "times of answers": True,
        "drafts are accepted": True,
    }


def test_only_drafts_behind_an_end_of_text_may_be_counted_by_the_server_alone() -> None:
    cell = ServedCell(K)
    cell.answer("ends", [1, 3], end=2)  # the first draft of the last pass was the end; the server counts all three
    assert cell.records[0].accepted == (1, 1)
    assert all(check.ok for check in checked(cell).values())
    for position, more in ((0, False), (1, True), (2, True)):
        cell = ServedCell(K)
        cell.answer("ends", [1, 1], end=0)
        cell.counters["accepted"] += 1
        cell.counters["per_position"][position] += 1
        made = checked(cell)
        assert made["accepted drafts"].ok
        assert made["accepted by position"].ok == more
    cell = ServedCell(K)
    cell.answer("is cut", [1, 1])  # at the token limit: counted in full by both
    cell.counters["accepted"] += 1
    cell.counters["per_position"][1] += 1
    assert checked(cell)["accepted drafts"].failed


def counts(name: str, by: int = 1) -> Defect:
    def plant(cell: ServedCell) -> None:
        cell.counters[name] += by

    return plant


def position(index: int, by: int) -> Defect:
    def plant(cell: ServedCell) -> None:
        cell.counters["per_position"][index] += by

    return plant


def lost_request(cell: ServedCell) -> None:
    del cell.records[2]


def nothing_in_flight(cell: ServedCell) -> None:
    cell.now = [2 * max(cell.now)]


def lost_pass(cell: ServedCell) -> None:
    record = cell.records[1]
    assert record.accepted
    assert record.drafted
    cell.records[1] = replace(record, accepted=record.accepted[1:], drafted=record.drafted[1:])


def moved_draft(cell: ServedCell) -> None:
    record = cell.records[1]
    assert record.accepted
    accepted = list(record.accepted)
    accepted[accepted.index(3)] = accepted[accepted.index(1)] = 2  # the sum stays
    cell.records[1] = replace(record, accepted=tuple(accepted))


def idle(cell: ServedCell) -> None:
    nothing: list[int] = [0] * 8
    fresh = ServedCell(cell.k)
    for number in range(3):
        fresh.answer(f"p-{number}", nothing)
    cell.records, cell.counters, cell.now = fresh.records, fresh.counters, fresh.now


def lost_ids(cell: ServedCell) -> None:
    cell.records[0] = replace(cell.records[0], token_ids=cell.records[0].token_ids[:-1])


def backwards(cell: ServedCell) -> None:
    at = cell.records[0].arrivals_s
    assert at
    cell.records[0] = replace(cell.records[0], arrivals_s=(at[0], at[2], at[1], *at[3:]))


def late(cell: ServedCell) -> None:
    cell.records[0] = replace(cell.records[0], duration_s=cell.records[0].duration_s + 5 * max(cell.now))


def too_many_at_once(cell: ServedCell) -> None:
    cell.now = [max(cell.now) * 0.7]


def no_counters(cell: ServedCell) -> None:
    cell.counters |= {"drafts": None, "accepted": 0, "per_position": []}


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (counts("requests"), {"requests"}),
        (counts("output_tokens", -1), {"output tokens"}),
        (counts("drafts"), {"verify passes"}),
        (counts("draft_tokens"), {"drafts"}),
        (counts("accepted", 40), {"accepted drafts", "acceptance length is 1 + sum of survival"}),
        (counts("accepted", -1), {"acceptance length is 1 + sum of survival"}),
        (position(1, 9), {"accepted by position", "acceptance length is 1 + sum of survival"}),
        (
            lost_request,
            {
                *("requests", "output tokens", "verify passes", "drafts", "accepted drafts", "accepted by position"),
                "wall clock",  # in which nothing was in flight then for a while
            },
        ),
        (nothing_in_flight, {"wall clock"}),
        (lost_pass, {"verify passes", "drafts", "accepted drafts", "accepted by position"}),
        (moved_draft, {"accepted by position"}),
        (idle, {"drafts are accepted"}),
        (lost_ids, {"token ids"}),
        (backwards, {"times of answers"}),
        (late, {"wall clock"}),
        (too_many_at_once, {"wall clock"}),
        (no_counters, {"verify passes"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_defects_are_found(plant: Defect, found: set[str]) -> None:
    cell = served(K)
    plant(cell)
    failed = {check.name: check.detail for check in checked(cell).values() if check.failed}
    assert failed.keys() == found
    assert all(failed.values())


def test_a_plain_arm_that_speculates_is_found() -> None:
    cell = served(0)
    cell.counters["drafts"] = 3
    assert checked(cell)["verify passes"].failed


def test_without_passes_a_lost_share_of_the_counts_is_found() -> None:
    cell = without_passes(served(K))
    cell.counters["drafts"] //= 2
    cell.counters["accepted"] //= 2
    assert checked(cell)["tokens of the passes"].failed
    cell = without_passes(served(K))
    cell.counters["accepted"] = 0
    cell.counters["per_position"] = [0] * K
    made = checked(cell)
    assert made["drafts are accepted"].failed
    assert made["drafts are accepted"].detail.endswith("1.000")
