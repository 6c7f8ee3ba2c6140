"""Admission, order of requests, frequency and rollout: each against its rule in plain words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemctl.core.policy import (
    MIB,
    Counts,
    Held,
    Memory,
    Waiting,
    admit,
    admit_request,
    budget,
    decide_rollout,
    expired,
    low_priority,
    order,
    plan_replace,
)

ORIN = Memory(total=7336 * MIB, available=6000 * MIB, reserve=700 * MIB)

# Memory.


def test_budget_is_the_smaller_of_share_and_what_is_free() -> None:
    assert budget(ORIN) // MIB == 4768  # 0.65 * 7336
    assert budget(Memory(7336 * MIB, 2000 * MIB, 700 * MIB)) // MIB == 1300
    assert budget(Memory(7336 * MIB, 500 * MIB, 700 * MIB)) == 0


def test_loaded_models_count_against_the_share() -> None:
    assert budget(ORIN, [Held("a", 3000 * MIB)]) // MIB == 1768


def test_mapped_weights_are_not_available() -> None:
    """The kernel says 3000 MiB are available, 2500 of them are the weights that answer now."""
    memory = Memory(7336 * MIB, 3000 * MIB, 200 * MIB)
    assert budget(memory, [Held("a", 2600 * MIB, mapped=2500 * MIB)]) // MIB == 300


def test_the_operators_limit_is_a_ceiling_too() -> None:
    assert budget(Memory(7336 * MIB, 6000 * MIB, most=1000 * MIB)) // MIB == 1000


def test_admission_says_the_numbers() -> None:
    fits = admit(ORIN, [], Held("gemma", 2284 * MIB))
    assert (fits.fits, fits.short) == (True, 0)
    assert fits.sentence == "gemma: needs 2284 MiB of 4768 MiB that are left"
    loaded = [Held("text", 3000 * MIB), Held("tiny", 200 * MIB)]
    short = admit(ORIN, loaded, Held("gemma", 2284 * MIB))
    assert (short.fits, short.short) == (False, 2284 * MIB - short.budget)
    assert short.sentence == (
        "gemma: needs 2284 MiB, 1568 MiB are left of 4768 MiB for all models (6000 MiB available, "
        "700 MiB kept in reserve; loaded: text 3000 MiB, tiny 200 MiB); gemctl model unload text"
    )


def test_a_model_that_never_fits_is_told_so() -> None:
    never = admit(ORIN, [Held("tiny", 200 * MIB)], Held("huge", 9000 * MIB))
    assert never.sentence.endswith("or compile it with a smaller --kv-cache-size")


def test_only_what_may_be_unloaded_is_proposed() -> None:
    """The smallest that is enough; a pinned one, where no other is, with what to type before."""
    wanted = Held("gemma", 2284 * MIB)

    def remedy(*loaded: Held) -> str:
        return admit(ORIN, loaded, wanted).sentence.rpartition("; ")[2]

    large, small = Held("text", 2400 * MIB), Held("small", 2000 * MIB)
    fixed = Held("small", 2000 * MIB, pinned=True)
    assert remedy(large, small) == "gemctl model unload small"
    assert remedy(large, fixed) == "gemctl model unload text"
    assert "small 2000 MiB pinned)" in admit(ORIN, [large, fixed], wanted).sentence
    off = "gemctl model pin small --off, then gemctl model unload small"
    assert remedy(fixed, Held("text", 2400 * MIB, pinned=True)) == off
    assert remedy(Held("small", 2600 * MIB, pinned=True), Held("tiny", 100 * MIB)) == off
    tiny = [Held(f"m{i}", 900 * MIB, pinned=True) for i in range(5)]
    assert remedy(*tiny[:1], *(Held(f"n{i}", 900 * MIB) for i in range(4))).startswith("unload")
    assert remedy(*tiny).startswith("all models are pinned: gemctl model pin NAME --off")
    assert admit(ORIN, [], Held("huge", 9000 * MIB)).sentence.endswith(
        "; compile it with a smaller --kv-cache-size"
    )


sizes = st.integers(0, 9000).map(lambda mib: mib * MIB)


@settings(deadline=None)
@given(sizes, sizes, st.lists(sizes, max_size=4), sizes)
def test_what_is_admitted_fits_both_limits(
    total: int, available: int, loaded: list[int], wanted: int
) -> None:
    memory = Memory(total, min(available, total), 256 * MIB)
    held = [Held(f"m{i}", size) for i, size in enumerate(loaded)]
    answer = admit(memory, held, Held("new", wanted))
    room = sum(loaded) + wanted <= total * 0.65 and wanted <= memory.available - 256 * MIB
    assert answer.fits == (room or wanted == 0)
    assert answer.short == max(0, wanted - answer.budget)


def test_replace_beside_in_place_or_not_at_all() -> None:
    old = Held("v1", 2000 * MIB, mapped=1800 * MIB)
    free = Memory(7336 * MIB, 5800 * MIB, 700 * MIB)
    assert plan_replace(free, [old], old, Held("v2", 2300 * MIB)).strategy == "overlap"
    tight = plan_replace(free, [old], old, Held("v2", 3000 * MIB), read_mbps=1000.0, warm_s=0.3)
    assert tight.strategy == "serial"
    assert tight.gap_s == pytest.approx(3000 * MIB / 1e9 + 0.3)
    assert tight.sentence == (
        "v2: needs 3000 MiB, 2768 MiB are left beside v1 (2000 MiB) and 4768 MiB without it; a "
        "serial replacement answers nothing for about 3.4 s"
    )
    none = plan_replace(free, [old], old, Held("v2", 5000 * MIB))
    assert none.strategy == "refuse"
    assert "needs 5000 MiB" in none.sentence


def test_replace_of_nothing_is_a_load() -> None:
    assert plan_replace(ORIN, [], None, Held("v1", 100 * MIB)).strategy == "overlap"
    assert plan_replace(ORIN, [], None, Held("v1", 9000 * MIB)).strategy == "refuse"


@settings(deadline=None)
@given(sizes, sizes, sizes, st.lists(sizes, max_size=3))
def test_overlap_fits_with_the_old_one_and_serial_without(
    available: int, old_size: int, new_size: int, others: list[int]
) -> None:
    memory = Memory(8000 * MIB, min(available, 8000 * MIB), 256 * MIB)
    old = Held("old", old_size)
    loaded = [old, *(Held(f"o{i}", size) for i, size in enumerate(others))]
    plan = plan_replace(memory, loaded, old, Held("new", new_size))
    ceiling = int(8000 * MIB * 0.65)
    if plan.strategy == "overlap" and new_size:
        assert sum(others) + old_size + new_size <= ceiling
    if plan.strategy == "serial":
        assert sum(others) + new_size <= ceiling
        assert plan.gap_s > 0.0


# Requests.


def ids(queue: tuple[Waiting, ...]) -> list[str]:
    return [request.id for request in queue]


def test_order_by_class_deadline_arrival() -> None:
    queue = [
        Waiting("text", 0.0, model_class=2),
        Waiting("late", 1.0, model_class=0, deadline_s=9.0),
        Waiting("none", 0.5, model_class=0),
        Waiting("soon", 2.0, model_class=0, deadline_s=3.0),
        Waiting("urgent", 3.0, model_class=0, request_class=0),
    ]
    assert ids(order(queue, 4.0)) == ["urgent", "soon", "late", "none", "text"]


def test_equal_requests_keep_their_order() -> None:
    queue = [Waiting(str(i), 1.0) for i in range(20)]
    assert order(queue, 2.0) == tuple(queue)


def test_nothing_starves() -> None:
    """A command a second, each done in a second, would hold a text for ever: it waits 10 s."""
    queue = [Waiting("text", 0.0, model_class=2)]
    served, now = [], 0.0
    for second in range(30):
        queue.append(Waiting(f"c{second}", now, model_class=0))
        first = order(queue, now)[0]
        served.append(first.id)
        queue.remove(first)
        now += 1.0
    assert served.index("text") == 10


requests = st.builds(
    Waiting,
    id=st.uuids().map(str),
    arrival_s=st.floats(0.0, 100.0),
    model_class=st.integers(0, 3),
    request_class=st.integers(0, 3),
    deadline_s=st.none() | st.floats(0.0, 200.0),
)


@settings(deadline=None)
@given(st.lists(requests, max_size=20), st.floats(0.0, 200.0))
def test_order_is_a_permutation_with_the_starved_first(queue: list[Waiting], now: float) -> None:
    ordered = order(queue, now)
    assert sorted(map(id, ordered)) == sorted(map(id, queue))
    starved = [now - request.arrival_s >= 10.0 for request in ordered]
    assert starved == sorted(starved, reverse=True)
    arrivals = [r.arrival_s for r, s in zip(ordered, starved, strict=True) if s]
    assert arrivals == sorted(arrivals)


def test_expired_and_low_priority() -> None:
    queue = [
        Waiting("a", 0.0, deadline_s=5.0),
        Waiting("b", 0.0),
        Waiting("c", 0.0, deadline_s=6.0),
    ]
    assert ids(expired(queue, 5.0)) == ["a"]
    assert not low_priority(Waiting("a", 0.0))
    assert low_priority(Waiting("a", 0.0, request_class=2))
    assert low_priority(Waiting("a", 0.0, model_class=2))


def test_a_deadline_that_cannot_be_met_is_refused_with_numbers() -> None:
    request = Waiting("r7", 10.0, deadline_s=10.5)
    assert admit_request(request, 10.0, 0.0, 0.1, 5, 12.0) is None
    assert admit_request(request, 10.0, 0.2, 0.1, 5, 12.0) == (
        "request r7: needs about 633 ms (200 ms behind others), its deadline is in 500 ms; ask for "
        "fewer tokens or allow more time"
    )
    assert admit_request(Waiting("x", 0.0), 10.0, 99.0, 1.0, 500, 12.0) is None
    assert admit_request(request, 10.0, 99.0, 1.0, 500, 0.0) is None


# Rollout.


def test_stages_of_a_rollout_that_goes_well() -> None:
    stages, counts, seen = [5.0, 50.0], Counts(200), []
    for _ in range(20):
        answer = decide_rollout(stages, counts)
        seen.append((answer.action, answer.devices))
        if answer.action == "done":
            break
        started = counts.started + answer.devices
        good = counts.good if answer.action == "start" else counts.started
        counts = Counts(200, started=started, good=good)
    assert seen == [
        *(("start", 10), ("wait", 0), ("start", 90), ("wait", 0)),
        *(("start", 100), ("wait", 0), ("done", 0)),
    ]


def test_one_rollback_halts() -> None:
    answer = decide_rollout([5.0, 50.0], Counts(200, started=10, good=8, bad=1))
    assert (answer.action, answer.devices) == ("halt", 0)
    assert "1 of 10 devices rolled back, 0 allowed" in answer.sentence
    assert (
        decide_rollout([5.0], Counts(200, started=10, good=9, bad=1), bad_most=1).action == "start"
    )


def test_silence_halts() -> None:
    answer = decide_rollout([50.0], Counts(200, started=100, good=96, lost=3))
    assert "3 of 100 devices fell silent, 2 % allowed" in answer.sentence
    assert decide_rollout([50.0], Counts(200, started=100, good=98, lost=2)).action == "start"


def test_a_stage_that_was_started_in_part_is_completed() -> None:
    answer = decide_rollout([5.0, 50.0], Counts(200, started=4))
    assert (answer.action, answer.devices, answer.stage) == ("start", 6, 0)


def test_small_fleets_and_none() -> None:
    assert decide_rollout([5.0, 50.0], Counts(1)).devices == 1
    assert decide_rollout([5.0], Counts(1, started=1, good=1)).action == "done"
    assert decide_rollout([5.0], Counts(0)).action == "done"


@pytest.mark.parametrize("percents", [[], [0.0], [50.0, 5.0], [5.0, 5.0], [120.0]])
def test_bad_percentages(percents: list[float]) -> None:
    with pytest.raises(ValueError, match="must ascend"):
        decide_rollout(percents, Counts(10))


@pytest.mark.parametrize(
    "counts",
    [Counts(10, started=11), Counts(10, started=2, good=3), Counts(10, started=2, good=-1)],
)
def test_counts_that_do_not_add_up(counts: Counts) -> None:
    with pytest.raises(ValueError, match="does not add up"):
        decide_rollout([5.0], counts)


@settings(deadline=None)
@given(
    st.lists(st.floats(0.1, 100.0), min_size=1, max_size=5, unique=True).map(sorted),
    st.integers(0, 300),
    st.data(),
)
def test_a_rollout_ends_and_never_starts_more_than_it_may(
    percents: list[float], total: int, data: st.DataObject
) -> None:
    counts = Counts(total)
    for _ in range(40):
        answer = decide_rollout(percents, counts)
        if answer.action in ("done", "halt"):
            break
        if answer.action == "start":
            assert 0 < answer.devices <= total - counts.started
            assert counts.bad == 0
            counts = Counts(total, counts.started + answer.devices, counts.good, counts.bad)
            continue
        open_now = counts.started - counts.good
        assert answer.action == "wait"
        assert open_now > 0
        bad = data.draw(st.sampled_from([0] * 9 + [1]))
        counts = Counts(total, counts.started, counts.good + open_now - bad, bad)
    assert answer.action == ("halt" if counts.bad else "done")
