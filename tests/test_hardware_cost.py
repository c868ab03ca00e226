"""What the cost model says holds whatever its constants are: more bandwidth is never slower, drafts have a price."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_shapes import setup

from mxq.errors import MxqError, UsageError
from mxq.hardware.acceptance import of_length, of_survival
from mxq.hardware.cost import PARTS, Setup, experts_touched
from mxq.hardware.memory import fits, need, running
from mxq.hardware.predict import Load, predict, tokens_per_s

NAMES = ("Qwen3.5-27B", "Qwen3.5-35B-A3B")
SETUPS = {(name, precision): setup(name, "h200", precision) for name in NAMES for precision in ("bf16", "mxfp4")}
setups = st.sampled_from(list(SETUPS.values()))
methods = st.sampled_from(["mtp", "dflash"])
budgets = st.integers(1, 15)
concurrencies = st.integers(1, 300)
contexts = st.integers(1, 100_000)


def seconds(one: Setup, method: str, k: int, concurrency: int, context: int) -> float:
    return sum(one.step(method, k, concurrency, context).values())


@given(setups, methods, budgets, concurrencies, contexts, st.floats(1, 10))
def test_a_faster_machine_is_never_slower(
    one: Setup, method: str, k: int, concurrency: int, context: int, factor: float
) -> None:
    before = seconds(one, method, k, concurrency, context)
    for name in ("bandwidth", "bf16", "mxfp4"):
        faster = replace(one, machine=replace(one.machine, **{name: factor * getattr(one.machine, name)}))
        assert seconds(faster, method, k, concurrency, context) <= before * (1 + 1e-12)
    for name in ("layer_s", "experts_s", "draft_s", "scan_s", "host_plain_s", "host_s", "host_draft_s"):
        slower = replace(one, machine=replace(one.machine, **{name: factor * getattr(one.machine, name)}))
        assert seconds(slower, method, k, concurrency, context) >= before * (1 - 1e-12)


@given(setups, methods, budgets, concurrencies, contexts)
def test_a_step_takes_longer_with_more_of_anything(
    one: Setup, method: str, k: int, concurrency: int, context: int
) -> None:
    step = seconds(one, method, k, concurrency, context) * (1 - 1e-12)
    assert step <= seconds(one, method, k + 1, concurrency, context)
    assert step <= seconds(one, method, k, concurrency + 1, context)
    assert step <= seconds(one, method, k, concurrency, context + 1)


@given(setups, methods, budgets, concurrencies, contexts)
def test_more_in_flight_never_give_fewer_tokens_nor_one_of_them_more(
    one: Setup, method: str, k: int, concurrency: int, context: int
) -> None:
    rates = [tokens_per_s(one, method, k, Load(c, context), 1) for c in (concurrency, concurrency + 1)]
    assert rates[0] <= rates[1] * (1 + 1e-9)
    assert rates[0] / concurrency >= rates[1] / (concurrency + 1) * (1 - 1e-9)


@given(setups, methods, concurrencies, contexts)
def test_without_drafts_it_is_plain_decoding(one: Setup, method: str, concurrency: int, context: int) -> None:
    assert one.step(method, 0, concurrency, context) == one.step("ar", 0, concurrency, context)
    assert one.step("ar", 7, concurrency, context) == one.step("ar", 0, concurrency, context)


@given(setups, methods, budgets, st.integers(1, 64), st.integers(1, 4096))
def test_drafts_that_are_never_accepted_never_gain(
    one: Setup, method: str, k: int, concurrency: int, context: int
) -> None:
    load = Load(concurrency, context)
    made = predict(one, method, load, of_length(1, k))
    assert made.speedup_same < 1
    assert made.break_even is not None
    assert made.break_even > 1
    # At the break-even length, if there is one, it is as fast as plain decoding.
    if made.break_even <= k + 1:
        assert predict(one, method, load, of_length(made.break_even, k)).speedup_same == pytest.approx(1)


@given(st.integers(1, 600), st.data(), st.integers(1, 5000))
def test_experts_touched_are_from_k_to_all(experts: int, data: st.DataObject, tokens: int) -> None:
    k = data.draw(st.integers(1, experts))
    touched = experts_touched(experts, k, tokens)
    assert k * (1 - 1e-9) <= touched <= experts
    assert touched <= experts_touched(experts, k, tokens + 1)
    assert touched <= k * tokens * (1 + 1e-9)
    assert experts_touched(experts, k, 1) == pytest.approx(k)


def test_experts_touched_by_counting() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    counted = [len({int(e) for _ in range(16) for e in rng.choice(256, 8, replace=False)}) for _ in range(300)]
    assert experts_touched(256, 8, 16) == pytest.approx(np.mean(counted), rel=0.01)


def test_parts_by_hand() -> None:
    # 27B on a machine of round numbers: 1 TB/s, operations and overheads for nothing.
    one = SETUPS["Qwen3.5-27B", "bf16"]
    machine = replace(one.machine, bandwidth=1e12, bf16=1e30, snapshot_share=0.5, scan_s=0.0)
    one = replace(one, machine=machine)
    parts = one.step("dflash", 15, 2, 1000)
    assert list(parts) == list(PARTS)
    layers = 48 * (10240 + 6144 + 6144 + 96) * 5120 + 16 * (12288 + 2048 + 6144) * 5120 + 64 * 3 * 5120 * 17408
    assert parts["weights"] == pytest.approx(2 * layers / 1e12)
    assert parts["lm_head"] == parts["draft lm_head"] == pytest.approx(2 * 248320 * 5120 / 1e12)
    assert parts["draft weights"] == pytest.approx(2 * 1_730_162_688 / 1e12, rel=1e-4)  # but for its norms
    assert parts["K/V"] == pytest.approx(2 * 1016 * 16 * 2 * 4 * 256 * 2 / 1e12)
    state = 48 * 128 * 128 * 4 + 10240 * 3 * 2
    assert parts["state"] == pytest.approx(2 * 48 * 2 * state / 1e12)
    assert parts["snapshots"] == pytest.approx(2 * 48 * 16 * state / 0.5e12)
    assert parts["operations"] == pytest.approx(0)
    # Packed, 4.25 bits a parameter; MTP's passes and lm_head stay bf16, once for each draft.
    packed = replace(SETUPS["Qwen3.5-27B", "mxfp4"], machine=replace(one.machine, packed_share=1.0, mxfp4=1e30))
    assert packed.step("ar", 0, 1, 1)["weights"] == pytest.approx((layers - 48 * 96 * 5120) * 17 / 32 / 1e12, rel=0.02)
    kept = packed.step("mtp", 5, 1, 1)
    assert kept["draft lm_head"] == pytest.approx(5 * parts["lm_head"])
    # With the recipe mxfp4-mtp all of them but fc are packed.
    mtp = replace(packed, packed=replace(packed.packed, mtp=True)).step("mtp", 5, 1, 1)
    fc = 5 * 2 * 2 * 5120**2 / 1e12
    assert mtp["draft weights"] - fc == pytest.approx((kept["draft weights"] - fc) * 17 / 64)
    assert mtp["weights"] == kept["weights"]


def test_kernels_that_unpack_read_and_multiply_one_after_the_other() -> None:
    # A machine of round numbers, 1 TB/s and 100 TFLOP/s, which multiplies bf16 for nothing.
    one = SETUPS["Qwen3.5-27B", "mxfp4"]
    machine = replace(one.machine, bandwidth=1e12, packed_share=1.0, bf16=1e30, mxfp4=1e14)
    longer, both = (replace(one, machine=replace(machine, packed_overlap=share)) for share in (1.0, 0.0))
    for tokens in (1, 30, 1000):
        parts = longer.step("ar", 0, tokens, 100), both.step("ar", 0, tokens, 100)
        packed = parts[1]["operations"] / (2 * tokens / 1e14)  # parameters
        reading, multiplying = packed * 17 / 32 / 1e12, packed * 2 * tokens / 1e14
        assert packed == pytest.approx(24.3e9, rel=0.01)
        assert parts[0]["operations"] == pytest.approx(max(0.0, multiplying - reading), rel=0.01, abs=1e-9)
        assert {**parts[0], "operations": 0} == pytest.approx({**parts[1], "operations": 0})


def test_operations_count_only_where_they_take_longer_than_reading() -> None:
    one = SETUPS["Qwen3.5-27B", "bf16"]
    few, many = one.step("ar", 0, 1, 100), one.step("ar", 0, 1000, 100)
    assert few["operations"] == 0
    whole = many["weights"] + many["lm_head"] + many["operations"]
    matrices = one.target.parameters - one.target.small - one.target.mtp
    assert whole == pytest.approx(2 * matrices * 1000 / one.machine.bf16, rel=1e-3)


def test_prefill_is_counted_where_lengths_are_given() -> None:
    one = SETUPS["Qwen3.5-27B", "bf16"]
    load = Load.of_request(4, 256, 512)
    step = seconds(one, "mtp", 3, 4, 512)
    whole = one.prompts(4, 256) + 511 / 2.5 * step
    assert tokens_per_s(one, "mtp", 3, load, 2.5) == pytest.approx(4 * 512 / whole)
    assert tokens_per_s(one, "mtp", 3, Load(4, 512), 2.5) == pytest.approx(4 * 2.5 / step)


def test_prompts_that_come_at_once_take_passes_that_the_host_prepares() -> None:
    for one in (SETUPS[name, "bf16"] for name in NAMES):
        assert one.machine.prompt_passes == 3
        free = replace(one, machine=replace(one.machine, bandwidth=1e30, bf16=1e30, prompt_s=0.1))
        assert [free.prompts(count, 256) for count in (1, 2, 3, 32)] == pytest.approx([0.1, 0.2, 0.3, 0.3])
        single = replace(free, machine=replace(free.machine, prompt_passes=1.0))
        assert single.prompts(32, 256) == pytest.approx(0.1)
        # Where the GPU takes longer than the host, it is one pass.
        gpu, both = (replace(one, machine=replace(one.machine, prompt_s=seconds)) for seconds in (0.0, 1e-6))
        assert both.prompts(32, 256) == pytest.approx(gpu.prompts(32, 256) + 1e-6)
        # What experts cost beside bytes and operations is in prompt_s, as layers' is.
        assert replace(gpu, machine=replace(gpu.machine, experts_s=1.0)).prompts(4, 256) == gpu.prompts(4, 256)


def test_a_step_is_no_shorter_than_the_host_needs() -> None:
    one = SETUPS["Qwen3.5-35B-A3B", "mxfp4"]
    slow = replace(one, machine=replace(one.machine, host_plain_s=0.2, host_s=0.5, host_draft_s=0.1))
    assert seconds(slow, "dflash", 15, 1, 1) == pytest.approx(0.5)
    assert seconds(slow, "mtp", 4, 1, 1) == pytest.approx(0.5 + 3 * 0.1)
    assert seconds(slow, "ar", 0, 1, 1) == pytest.approx(0.2)
    none = replace(one, machine=replace(one.machine, host_plain_s=0.0, host_s=0.0, host_draft_s=0.0))
    assert none.step("mtp", 4, 32, 1)["host"] == none.step("ar", 0, 1, 1)["host"] == 0
    # Many requests keep the GPU busy for longer than the host needs.
    assert one.step("mtp", 4, 32, 1) == none.step("mtp", 4, 32, 1)


def test_layers_with_experts_have_an_overhead_of_their_own() -> None:
    for name, layers in (("Qwen3.5-27B", 0), ("Qwen3.5-35B-A3B", 40)):
        one = SETUPS[name, "bf16"]
        bare = replace(one, machine=replace(one.machine, experts_s=0.0, host_plain_s=0.0, host_s=0.0, host_draft_s=0.0))
        more = replace(bare, machine=replace(bare.machine, experts_s=1e-3))
        assert seconds(more, "ar", 0, 1, 1) - seconds(bare, "ar", 0, 1, 1) == pytest.approx(layers * 1e-3)
        mtp = seconds(more, "mtp", 3, 1, 1) - seconds(bare, "mtp", 3, 1, 1)
        assert mtp == pytest.approx((layers + 3 * bool(layers)) * 1e-3, rel=1e-6), "its layer has experts, too"


def test_no_break_even_is_below_one() -> None:
    one = SETUPS["Qwen3.5-35B-A3B", "mxfp4"]
    slow = replace(one, machine=replace(one.machine, host_plain_s=1.0, host_s=0.0, host_draft_s=0.0))
    assert predict(slow, "dflash", Load(1, 100), of_length(2, 7)).break_even == 1


def test_the_best_budget_is_the_best() -> None:
    one, load = SETUPS["Qwen3.5-27B", "bf16"], Load(32, 1024)
    accepted = of_survival([0.8, 0.6, 0.4, 0.1, 0.05, 0.01, 0.0], 7)
    made = predict(one, "mtp", load, accepted)
    rates = {k: tokens_per_s(one, "mtp", k, load, accepted.length(k)) for k in range(1, 8)}
    assert made.best_k == (max(rates, key=lambda k: rates[k]), max(rates.values()))
    assert made.best_k[0] < 7


@given(st.integers(1, 40), st.floats(0, 1))
def test_a_length_gives_survival_of_that_length(k: int, share: float) -> None:
    length = 1 + share * k
    accepted = of_length(length, k)
    assert accepted.length(k) == pytest.approx(length)
    assert of_survival(accepted.survival, k).survival == accepted.survival


@pytest.mark.parametrize("length", [0.99, 4.01, float("nan"), -1, float("inf")])
def test_a_length_that_no_pass_can_have_is_refused(length: float) -> None:
    with pytest.raises(UsageError, match="a pass commits 1 to K \\+ 1 = 4 tokens"):
        of_length(length, 3)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([0.5, 0.6, 0.1], "survival rises from 0.5 to 0.6 at position 2"),
        ([1.1, 0.6, 0.1], "survival at position 1 is 1.1"),
        ([0.5, 0.4, -0.1], "survival at position 3 is -0.1"),
        ([0.5, 0.4, float("nan")], "survival at position 3 is nan"),
        ([0.5, 0.4], "survival has 2 shares with K 3"),
    ],
)
def test_survival_that_cannot_be_is_refused(shares: list[float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        of_survival(shares, 3)


def test_a_model_that_does_not_fit_says_by_how_much_and_where_it_does() -> None:
    one = SETUPS["Qwen3.5-35B-A3B", "bf16"]
    small = replace(one, machine=replace(one.machine, memory=50e9))
    needed = need(small, "dflash", 15, 1, 4096)
    assert needed.target == one.target.weight_bytes()
    over = (needed.total - 45e9) / 1e9
    with pytest.raises(
        MxqError, match=rf"is {over:.2f} GB too small for one request: 72.85 GB of .*; it fits with TP 2"
    ):
        predict(small, "dflash", Load(8, 4096), of_length(3, 15))
    assert fits(small, "dflash", 15, 1, 4096, tp=2)
    tiny = replace(one, machine=replace(one.machine, memory=1e9))
    with pytest.raises(MxqError, match="does not with TP 64 either"):
        predict(tiny, "ar", Load(1, 100), None)
    # Snapshots are K + 1 states for each request; plain decoding keeps one.
    assert need(one, "mtp", 15, 8, 10).state == 16 * need(one, "ar", 0, 8, 10).state


@given(setups, methods, budgets, concurrencies, contexts)
def test_as_many_run_as_fit(one: Setup, method: str, k: int, concurrency: int, context: int) -> None:
    most = running(one, method, k, concurrency, context)
    assert 1 <= most <= concurrency
    assert fits(one, method, k, most, context)
    assert most == concurrency or not fits(one, method, k, most + 1, context)
    made = predict(one, method, Load(concurrency, context), of_length(2, k))
    assert made.running == most
    assert made.tokens_per_s == predict(one, method, Load(most, context), of_length(2, k)).tokens_per_s


def test_requests_that_find_no_room_wait_for_the_others() -> None:
    one = SETUPS["Qwen3.5-27B", "bf16"]
    load = Load.of_request(32, 256, 512)
    assert running(one, "dflash", 15, 32, load.longest) == 30
    seconds_of = {n: n * 512 / tokens_per_s(one, "dflash", 15, Load.of_request(n, 256, 512), 9) for n in (30, 2)}
    assert tokens_per_s(one, "dflash", 15, load, 9) == pytest.approx(32 * 512 / sum(seconds_of.values()))
    made = predict(one, "dflash", load, of_length(9, 15))
    assert made.break_even is not None
    assert predict(one, "dflash", load, of_length(made.break_even, 15)).speedup_same == pytest.approx(1)


def test_bf16_that_does_not_fit_is_no_baseline() -> None:
    one = SETUPS["Qwen3.5-27B", "mxfp4"]
    small = replace(one, machine=replace(one.machine, memory=40e9))
    assert predict(small, "ar", Load(1, 100), None).speedup_bf16 is None
    assert predict(one, "ar", Load(1, 100), None).speedup_bf16 is not None


@pytest.mark.parametrize(
    ("hardware", "precision", "method", "k", "message"),
    [
        ("mi300x", "mxfp4", "ar", 0, "MI300X has no kernel for MXFP4"),
        ("h200", "bf16", "dflash", 16, "K 16 with a drafter of block 16"),
    ],
)
def test_what_is_not_there_is_refused(hardware: str, precision: str, method: str, k: int, message: str) -> None:
    accepted = of_length(1.5, k) if k else None
    with pytest.raises(UsageError, match=message):
        predict(setup("Qwen3.5-27B", hardware, precision), method, Load(1, 100), accepted)


def test_drafters_that_are_missing_are_named() -> None:
    one = replace(SETUPS["Qwen3.5-27B", "bf16"], drafter=None)
    with pytest.raises(UsageError, match="DFlash needs the shape of a drafter"):
        predict(one, "dflash", Load(1, 100), of_length(2, 3))
    headless = replace(one, target=replace(one.target, has_mtp=False))
    with pytest.raises(UsageError, match="no MTP head"):
        predict(headless, "mtp", Load(1, 100), of_length(2, 3))
