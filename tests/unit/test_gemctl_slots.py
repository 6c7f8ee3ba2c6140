"""Slots: the table is complete, every state has a way back, the procedures of the daemon fit it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemctl.core.slots import (
    EVENTS,
    STATES,
    TABLE,
    WITH_WORKER,
    Crashes,
    Event,
    Refusal,
    State,
    TransitionError,
    allowed,
    step,
    table_text,
)

EXPECTED = """
empty staging verifying loading warming standby serving draining disabled faulted
stage      staging - - - - - - - - staging
staged     - verifying - - - - - - - -
load       verifying - - - - - - - - -
verified   - - loading - - - - - - -
loaded     - - - warming - - - - - -
warmed     - - - - standby - - - - -
activate   - - - - - serving - serving - -
deactivate - - - - - - standby - - -
drain      - - - - - draining draining - - -
retain     - - - - - - - standby - -
drained    - - - - - - - empty - -
unload     - empty empty empty empty empty - - - -
disable    disabled disabled disabled disabled disabled disabled - disabled - -
enable     - - - - - - - - loading -
fail       - empty empty empty empty faulted faulted empty - -
crash      - - - loading loading loading loading empty - -
restart    - - - loading - - - - - -
give_up    - - - faulted - - - - - -
clear      - - - - - - - - - empty
"""


def walk(state: State, *events: Event) -> State:
    for event in events:
        state = step(state, event)
    return state


def reachable(start: State) -> set[State]:
    """States that some sequence of allowed events leads to, `start` included."""
    found, open_now = {start}, [start]
    while open_now:
        here = open_now.pop()
        for event in allowed(here):
            following = step(here, event)
            if following not in found:
                found.add(following)
                open_now.append(following)
    return found


def test_the_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = table_text()
    print(text)
    assert capsys.readouterr().out
    assert [row.split() for row in text.splitlines()] == [
        row.split() for row in EXPECTED.strip().splitlines()
    ]


def test_every_pair_has_an_entry() -> None:
    assert set(TABLE) == set(STATES)
    for state in STATES:
        assert set(TABLE[state]) == set(EVENTS)
        for entry in TABLE[state].values():
            assert isinstance(entry, Refusal) or entry in STATES


def test_refusals_say_what_to_do() -> None:
    for state in STATES:
        for event in EVENTS:
            entry = TABLE[state][event]
            if isinstance(entry, Refusal):
                what, _, remedy = entry.sentence.partition("; ")
                assert what, f"{state} {event}"
                assert remedy, f"{state} {event}"
                with pytest.raises(TransitionError, match=remedy) as caught:
                    step(state, event)
                assert (caught.value.state, caught.value.event) == (state, event)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TABLE["empty"]["stage"] = "serving"  # type: ignore[index]


def test_every_state_is_reachable_and_leads_on() -> None:
    assert reachable("empty") == set(STATES)
    for state in STATES:
        assert {"serving", "empty"} <= reachable(state), state


def test_every_event_is_allowed_somewhere() -> None:
    for event in EVENTS:
        assert any(event in allowed(state) for state in STATES), event


@settings(deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=60))
def test_no_sequence_leads_out_or_into_a_dead_end(events: list[Event]) -> None:
    state: State = "empty"
    for event in events:
        try:
            following = step(state, event)
        except TransitionError:
            continue
        assert following in STATES
        if state == "faulted":
            assert event in ("clear", "stage")
        if following == "serving" and state != "serving":
            assert event == "activate"
        state = following
    assert {"serving", "empty"} <= reachable(state)


def test_faulted_is_left_by_clear_or_another_file_only() -> None:
    assert allowed("faulted") == ("stage", "clear")


def test_a_serving_model_is_never_dropped_without_draining() -> None:
    gone = {"empty", "disabled", "staging", "verifying"}
    for event in allowed("serving"):
        assert step("serving", event) not in gone, event


def test_only_states_with_a_worker_can_crash() -> None:
    assert {state for state in STATES if "crash" in allowed(state)} == WITH_WORKER


LOAD: tuple[Event, ...] = ("load", "verified", "loaded", "warmed", "activate")
CANDIDATE: tuple[Event, ...] = ("stage", "staged", "verified", "loaded", "warmed", "activate")


def test_load_and_unload() -> None:
    assert walk("empty", *LOAD) == "serving"
    assert walk("serving", "drain", "drained") == "empty"
    assert walk("serving", "deactivate", "unload") == "empty"


def test_switch_between_two_resident_models() -> None:
    small, large = walk("empty", *LOAD), walk("empty", *LOAD[:-1])
    assert (walk(large, "activate"), walk(small, "deactivate")) == ("serving", "standby")


def test_replace_with_probation_passed() -> None:
    old, candidate = walk("empty", *LOAD), walk("empty", *CANDIDATE)
    old = walk(old, "drain", "retain")
    assert (old, candidate) == ("standby", "serving")
    assert walk(old, "unload") == "empty"


@pytest.mark.parametrize("steps", range(1, len(CANDIDATE) - 1))
def test_replace_with_a_candidate_that_fails_leaves_an_empty_slot(steps: int) -> None:
    assert walk("empty", *CANDIDATE[:steps], "fail") == "empty"


@pytest.mark.parametrize("before", [("drain",), ("drain", "retain")])
def test_rollback_while_draining_and_out_of_standby(before: tuple[Event, ...]) -> None:
    old, candidate = walk("serving", *before), walk("empty", *CANDIDATE)
    assert walk(old, "activate") == "serving"
    assert walk(candidate, "fail") == "faulted"
    assert walk(candidate, "drain", "drained") == "empty"


def test_rollback_after_the_old_one_is_gone_needs_a_load() -> None:
    assert walk("serving", "drain", "drained", *LOAD) == "serving"


def test_disable_and_enable() -> None:
    disabled = walk("serving", "drain", "disable")
    assert disabled == "disabled"
    assert walk(disabled, "enable", "loaded", "warmed", "activate") == "serving"
    with pytest.raises(TransitionError, match="enable it first"):
        step("disabled", "load")


def test_crash_restart_and_giving_up() -> None:
    crashes, state, now = Crashes(most=3, window_s=300.0), "serving", 1000.0
    for _ in range(2):
        state, crashes = step(state, "crash"), crashes.add(now)
        assert not crashes.is_faulted(now)
        now += crashes.next_delay(now)
        state = walk(state, "restart", "loaded", "warmed", "activate")
    state, crashes = step(state, "crash"), crashes.add(now)
    assert crashes.is_faulted(now)
    state = step(state, "give_up")
    assert state == "faulted"
    assert (step(state, "clear"), crashes.cleared().is_faulted(now)) == ("empty", False)
    assert walk(state, *CANDIDATE) == "serving"


def test_delays_double_up_to_the_longest() -> None:
    crashes, delays = Crashes(first_s=0.2, most_s=2.0, most=100), []
    for second in range(7):
        crashes = crashes.add(float(second))
        delays.append(crashes.next_delay(float(second)))
    assert delays == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert Crashes().next_delay(0.0) == 0.0


def test_old_crashes_are_forgotten() -> None:
    crashes = Crashes(most=2, window_s=60.0).add(0.0).add(59.0)
    assert crashes.is_faulted(59.5)
    assert not crashes.is_faulted(60.0)
    assert crashes.add(200.0).times_s == (200.0,)
    assert crashes.next_delay(1000.0) == 0.0


@settings(deadline=None)
@given(
    st.lists(st.floats(0.0, 1000.0), max_size=200),
    st.integers(1, 20),
    st.floats(0.001, 10.0),
    st.floats(10.0, 100.0),
)
def test_crashes_hold_their_ranges(
    gaps: list[float], most: int, first_s: float, most_s: float
) -> None:
    crashes, now = Crashes(most=most, first_s=first_s, most_s=most_s), 0.0
    for gap in gaps:
        now += gap
        before = len(crashes.times_s)
        crashes = crashes.add(now)
        assert first_s <= crashes.next_delay(now) <= most_s
        assert crashes.is_faulted(now) == (len(crashes.times_s) >= most)
        assert len(crashes.times_s) <= before + 1
