"""Staged rollouts: the decision by itself, and 200 simulated devices on a real mosquitto.

Every simulated device is the real bridge with a stand-in for its daemon (SimService), all in this
process; the fleet's side and the broker are the real ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from broker import Broker, FakeService, Running, client, running, until
from gemctl import fleet
from gemctl.core.policy import Counts
from gemctl.errors import ApiError
from gemctl.fleet import (
    Outcome,
    Progress,
    RolloutOptions,
    decide,
    order,
    stage_of,
    survey,
    text,
    time_left,
)
from gemctl.service import Caller, Emit

NEW, OLD = "b" * 64, "a" * 64
DEVICES = 200
NAMES = [f"d{number:03}" for number in range(DEVICES)]

# The decision


def play(
    devices: list[str],
    percents: tuple[float, ...],
    ends: Mapping[str, Outcome],
    max_bad: int = 0,
    parallel: int = 20,
    seed: int = 0,
) -> tuple[fleet.Decision, dict[str, Outcome], list[int]]:
    """Follow the decisions to the end, devices ending by chance in any order."""
    chance = random.Random(seed)
    outcomes: dict[str, Outcome] = {}
    starts: list[int] = []
    for _ in range(20 * len(devices) + 20):
        step = decide(devices, outcomes, percents, max_bad, parallel)
        if step.action in ("halt", "done"):
            return step, outcomes, starts
        under_way = [name for name, outcome in outcomes.items() if outcome == "running"]
        assert len(under_way) + len(step.devices) <= parallel
        for name in step.devices:
            assert outcomes.get(name, "pending") == "pending"
            outcomes[name] = "running"
        starts.append(len(step.devices))
        if step.action == "wait":
            assert under_way
            name = chance.choice(under_way)
            outcomes[name] = ends.get(name, "good")
    raise AssertionError("no end")


def test_the_order_is_the_same_in_every_run_and_another_for_another_version() -> None:
    first = order(NAMES, NEW)
    assert first == order(list(reversed(NAMES)), NEW)
    assert sorted(first) == NAMES
    assert first != order(NAMES, OLD)
    assert first != NAMES


def test_stages_wait_for_each_other() -> None:
    devices = order(NAMES, NEW)
    outcomes: dict[str, Outcome] = {}
    for upto in (10, 100, 200):
        step = decide(devices, outcomes, (5, 50, 100), parallel=1000)
        assert (step.action, list(step.devices)) == ("start", devices[len(outcomes) : upto])
        outcomes.update(dict.fromkeys(step.devices, "running"))
        for name in step.devices[:-1]:
            assert decide(devices, outcomes, (5, 50, 100), parallel=1000).action == "wait"
            outcomes[name] = "good"
        assert decide(devices, outcomes, (5, 50, 100), parallel=1000).action == "wait"
        outcomes[step.devices[-1]] = "good"
    assert decide(devices, outcomes, (5, 50, 100)).action == "done"


@pytest.mark.parametrize("percents", [(5.0, 50.0, 100.0), (5.0,), (1.0, 2.0, 30.0), (100.0,)])
@pytest.mark.parametrize("count", [1, 2, 7, 200])
@pytest.mark.parametrize("parallel", [1, 3, 1000])
def test_good_rollouts_end_at_the_last_percentage(
    percents: tuple[float, ...], count: int, parallel: int
) -> None:
    step, outcomes, starts = play(NAMES[:count], percents, {}, parallel=parallel)
    assert step.action == "done"
    assert len(outcomes) == -(-count * percents[-1] // 100)
    assert max(starts) <= parallel
    assert set(outcomes.values()) == {"good"}
    assert list(outcomes) == NAMES[: len(outcomes)]


def test_bad_devices_halt_and_the_others_stay_as_they_are() -> None:
    tried = 0
    for place in range(0, DEVICES, 13):
        for max_bad in (0, 1, 3):
            for parallel in (1, 20):
                ends: dict[str, Outcome] = {
                    NAMES[n]: "rolled_back" for n in range(place, min(place + max_bad + 1, DEVICES))
                }
                step, outcomes, _ = play(*(NAMES, (5, 50, 100), ends, max_bad, parallel, tried))
                tried += 1
                if len(ends) <= max_bad:
                    assert step.action == "done"
                    continue
                assert step.action == "halt"
                assert "rolled back" in step.sentence
                stage = next(n for n in (10, 100, 200) if place < n)
                after = next((n for n in (10, 100, 200) if place + max_bad < n), 200)
                assert len(outcomes) <= max(stage, after)
                assert list(outcomes.values()).count("rolled_back") == max_bad + 1
                if parallel == 1:
                    assert len(outcomes) == place + max_bad + 1
    print(f"{tried} rollouts with bad devices played")


def test_a_refusal_is_no_rollback() -> None:
    step, _, _ = play(NAMES[:20], (5, 100), {NAMES[0]: "refused"})
    assert step.action == "halt"
    assert "1 of 1 devices refused the version, 0 allowed" in step.sentence
    assert "rolled back" not in step.sentence


def test_stages_of_devices() -> None:
    found = [stage_of(place, 200, (5, 50)) for place in range(200)]
    assert found == [5] * 10 + [50] * 90 + [None] * 100
    assert stage_of(0, 1, (5, 100)) == 5
    assert decide(NAMES, {}, (5, 50)).stage == 5


def test_time_left() -> None:
    assert time_left([], [3.0], [5], 2) is None
    assert time_left([10.0, 20.0], [], [], 2) == 0.0
    assert time_left([10.0], [4.0, 9.0], [5, 1], 2) == 6.0 + 10.0 * (3 + 1)
    assert time_left([10.0], [99.0], [0], 2) == 0.0  # it takes longer than the others
    assert [text.span(s) for s in (0.2, 59, 91, 3600, 7300)] == [
        *("1 s", "59 s", "2 min", "60 min", "2 h 2 min"),
    ]


@pytest.mark.parametrize(
    ("found", "outcome", "reason"),
    [
        ({"digest": NEW, "state": "serving"}, "good", "has it already"),
        ({"digest": NEW, "state": "disabled"}, "good", "has it already, and is disabled"),
        ({"digest": NEW, "state": "serving", "on_probation": True}, "running", "has it already"),
        ({"present": [{"digest": NEW}]}, "pending", ""),
        ({"present": [], "bad": []}, "not_staged", f"{NEW[:12]} is not in its store; there: none"),
        ({}, "not_staged", f"{NEW[:12]} is not in its store; there: none"),
        ({"present": [{"digest": NEW}], "bad": [{"digest": NEW, "reason": "NaN"}]},
         "bad_version", "NaN"),
        ({"present": [{"digest": NEW}, {"digest": NEW[:60] + "cccc"}]}, "not_staged",
         "2 versions begin with bbbbbbbb; give more digits"),
    ],
)  # fmt: skip
def test_is_a_device_ready(found: dict[str, Any], outcome: str, reason: str) -> None:
    digest = NEW[:8] if "2 versions" in reason else NEW
    wanted = RolloutOptions(fleet.MqttConfig(), "m", digest)
    assert survey.judge(found, wanted) == (outcome, reason)


def test_silent_devices_halt() -> None:
    step, outcomes, _ = play(NAMES, (5, 50, 100), {NAMES[4]: "lost"}, parallel=1)
    assert (step.action, len(outcomes)) == ("halt", 5)
    assert "silent" in step.sentence


def test_what_was_done_before_counts() -> None:
    devices = order(NAMES, NEW)
    before: dict[str, Outcome] = dict.fromkeys(devices[:60], "good")
    step = decide(devices, before, (5, 50, 100), parallel=1000)
    assert list(step.devices) == devices[60:100]
    # somebody did ten elsewhere by hand: they take nobody's place in the first stage
    others: dict[str, Outcome] = dict.fromkeys(devices[-10:], "good")
    assert list(decide(devices, others, (5,)).devices) == devices[:10]
    assert decide(devices, dict.fromkeys(devices, "good"), (5, 50)).action == "done"
    assert decide([], {}, (5,)).action == "done"


@pytest.mark.parametrize("percents", [(), (0.0,), (50, 5), (5, 5), (5, 101), (-1, 5)])
def test_percentages_ascend(percents: tuple[float, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rollout"):
        decide(NAMES, {}, percents)
    config = fleet.MqttConfig(host="127.0.0.1", port=1)
    options = RolloutOptions(config, "m", NEW, percents)
    with pytest.raises(ApiError, match="rollout"):
        asyncio.run(fleet.rollout(options))
    assert Counts(1)


# With devices


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("fleet")) as made:
        yield made


@dataclass
class SimService(FakeService):
    """A daemon that replaces a model in no time; its probation ends as `fate` says."""

    fate: str = "good"
    deaf: bool = False  # it answers nothing
    asked_to: int = 0

    async def call(
        self, method: str, params: Mapping[str, Any], caller: Caller, emit: Emit | None = None
    ) -> dict[str, Any]:
        if self.deaf:
            await asyncio.sleep(3600)
        if method != "model.replace":
            return await super().call(method, params, caller, emit)
        self.asked_to += 1
        if self.fate == "mute":
            await asyncio.sleep(3600)
        if self.fate == "again":  # somebody replaced it by hand, after it was asked
            self.digest = NEW
            return {"model": self.model, "already": True}
        if self.fate == "refuse":
            raise ApiError("not_found", f"{self.model}: no version bbbbbbbb; stage its file")
        before, self.digest = self.digest, str(params["digest"])
        self.hub.publish("replace.done", model=self.model, digest=self.digest)
        loop = asyncio.get_running_loop()
        loop.call_later(0.02, self._end, before, self.digest)
        return {"model": self.model}

    def _end(self, before: str, digest: str) -> None:
        if self.fate == "bad":
            self.digest = before
            self.hub.publish("probation.bad", model=self.model, digest=digest, text="NaN")
        elif self.fate == "good":
            self.hub.publish("probation.good", model=self.model, digest=digest)


@asynccontextmanager
async def devices(broker: Broker, names: list[str]) -> AsyncIterator[dict[str, SimService]]:
    """The bridges of all of them, connected."""
    made: dict[str, Running] = {}
    async with AsyncExitStack() as stack:
        for name in names:
            groups = ["even"] if int(name[1:]) % 2 == 0 else ["odd"]
            protocol = "3.1.1" if int(name[1:]) % 5 == 0 else "5"
            config = broker.config(name, "fleet", groups=groups, protocol=protocol, stats_s=3)
            made[name] = await stack.enter_async_context(running(config, wait=False))
            service = SimService(made[name].hub)
            made[name].bridge._service = service
            made[name].bridge._dispatcher._service = service
        for one in made.values():
            await one.connected(seconds=60)
        yield {name: one.bridge._service for name, one in made.items()}  # type: ignore[misc]


def options(broker: Broker, **more: Any) -> RolloutOptions:
    config = broker.config("", "fleet")
    return RolloutOptions(config, "smollm", NEW, **{"timeout_s": 20.0, **more})


def on_new(found: dict[str, SimService]) -> set[str]:
    return {name for name, service in found.items() if service.digest == NEW}


async def everybody(broker: Broker) -> None:
    """Until all are online: on a busy machine one or the other loses its connection for a while."""
    for _ in range(20):
        listed = await fleet.status(broker.config("", "fleet"))
        if sum(one.online for one in listed) == DEVICES:
            return
        await asyncio.sleep(0.5)
    raise AssertionError("some devices stay offline")


def test_two_hundred_devices(broker: Broker) -> None:
    """One run whose third device rolls back, then a good one, then one with nothing to do."""

    async def body() -> None:
        chosen = order(NAMES, NEW)
        async with devices(broker, NAMES) as found:
            listed = await fleet.status(broker.config("", "fleet"))
            assert [one.device for one in listed if one.online] == NAMES
            assert {one.digest for one in listed} == {OLD}
            even = await fleet.status(broker.config("", "fleet"), "even")
            assert len(even) == DEVICES // 2

            found[chosen[2]].fate = "bad"
            said: list[Progress] = []
            result = await fleet.rollout(options(broker, parallel=1), said.append)
            assert result.action == "halt"
            assert [row.device for row in result.rows] == chosen
            words = [row.outcome for row in result.rows]
            assert words == ["good", "good", "rolled_back"] + ["pending"] * 197
            assert result.rows[2].reason == "NaN"
            stages = [row.stage for row in result.rows]
            assert stages == [5.0] * 10 + [50.0] * 90 + [100.0] * 100
            assert on_new(found) == set(chosen[:2])
            assert sum(service.asked_to for service in found.values()) == 3
            assert said[-1].outcome == "halt"
            print(f"halted: {result.sentence}; 3 of {DEVICES} devices touched, 2 have the version")

            # the same with many at once: nobody outside of the first stage is touched
            result = await fleet.rollout(options(broker))
            assert result.action == "halt"
            touched = {name for name, service in found.items() if service.asked_to}
            assert touched <= set(chosen[:10])

            await until(
                lambda: (
                    not any(
                        s.asked_to and s.digest == OLD for s in found.values() if s.fate == "good"
                    )
                )
            )
            found[chosen[2]].fate = "good"
            already = len(on_new(found))
            for service in found.values():
                service.asked_to = 0
            await everybody(broker)
            result = await fleet.rollout(options(broker))
            assert result.action == "done", result.sentence
            assert Counter(row.outcome for row in result.rows) == {"good": DEVICES}
            assert on_new(found) == set(NAMES)
            assert sum(service.asked_to for service in found.values()) == DEVICES - already
            print(f"done: {result.sentence}; {already} had it already")

            result = await fleet.rollout(options(broker))
            assert result.action == "done"
            assert {row.reason for row in result.rows} == {"has it already"}
            assert sum(service.asked_to for service in found.values()) == DEVICES - already

    asyncio.run(body())


def test_max_bad_refusals_and_groups(broker: Broker) -> None:
    async def body() -> None:
        names = NAMES[:20]
        group = order([name for name in names if int(name[1:]) % 2 == 0], NEW)
        async with devices(broker, names) as found:
            found[group[1]].fate, found[group[3]].fate = "bad", "refuse"
            wanted = {"group": "even", "max_bad": 1, "skip_unready": True}
            first = await fleet.rollout(options(broker, **wanted, parallel=1))
            assert first.action == "halt"
            words = [row.outcome for row in first.rows[:4]]
            assert words == ["good", "rolled_back", "good", "refused"]
            assert first.rows[3].reason.endswith("stage its file")
            said = "1 of 4 devices rolled back and 1 of 4 devices refused the version, 1 allowed"
            assert said in first.sentence
            found[group[1]].fate = "good"
            second = await fleet.rollout(options(broker, **wanted))
            assert second.action == "done"
            assert on_new(found) == set(group) - {group[3]}
            asked = [row.device for row in second.rows if row.outcome != "offline"]
            assert sorted(asked) == sorted(group)
            gone = [row.device for row in second.rows if row.outcome == "offline"]
            assert all(int(name[1:]) % 2 == 0 for name in gone)  # as they told it before they went

    asyncio.run(body())


NOT_READY = ("absent", "not_staged", "bad_version", "offline", "mute")


def test_devices_that_are_not_ready(tmp_path: Path) -> None:
    """Nothing begins, and each is named with its reason; left out by name, the others get it."""

    async def body(own: Broker) -> None:
        names = NAMES[:20]
        first = order(names, NEW)  # one of each, in the first, second and third stage
        places = (first[0], first[3], first[9], first[14], first[19])
        unready = dict(zip(NOT_READY, places, strict=True))
        async with devices(own, names) as found:
            found[unready["absent"]].model = "other"
            found[unready["not_staged"]].present = (OLD,)
            found[unready["bad_version"]].bad = ((NEW, "its worker ended"),)
            await gone(own, unready["offline"])
            found[unready["mute"]].deaf = True
            said: list[Progress] = []
            result = await fleet.rollout(options(own, discover_s=2.0), said.append)
            assert result.action == "refused"
            assert sum(service.asked_to for service in found.values()) == 0
            assert "5 of 20 devices are not ready" in result.sentence
            for part in (
                f"model unknown: {unready['absent']};",
                f"version not staged: {unready['not_staged']};",
                f"found bad there before: {unready['bad_version']};",
                "--skip-unready",
            ):
                assert part in result.sentence
            rows = {row.device: row for row in result.rows}
            reasons = {name: rows[device].reason for name, device in unready.items()}
            assert reasons["offline"] == "its status says so"
            assert reasons["mute"] == "no answer in 2 s"
            assert reasons["absent"].startswith("smollm: no such model")
            assert reasons["not_staged"] == f"{NEW[:12]} is not in its store; there: {OLD[:12]}"
            assert reasons["bad_version"] == "its worker ended"
            outcomes = {name: rows[device].outcome for name, device in unready.items()}
            assert outcomes == {**{name: name for name in NOT_READY}, "mute": "offline"}
            shown = text.refused(dataclasses.asdict(result))
            assert f"model unknown:\n  {unready['absent']}" in shown
            assert shown.count("\n  d") == 5
            assert said == []

            # the first stage alone does not reach the others
            few = await fleet.rollout(options(own, percents=(10.0,), discover_s=2.0))
            assert few.action == "refused"
            assert "1 of 2 devices are not ready" in few.sentence

            result = await fleet.rollout(
                options(own, discover_s=2.0, skip_unready=True), said.append
            )
            assert result.action == "done", result.sentence
            left_out = next(one for one in said if one.outcome == "left out")
            assert unready["absent"] in left_out.text
            assert on_new(found) == set(names) - set(unready.values())
            assert result.counts["good"] == 15
            rows = {row.device: row for row in result.rows}
            assert all(rows[device].stage is None for device in unready.values())
            assert [row.device for row in result.rows[-5:]] == sorted(unready.values())
            table = text.rollout(dataclasses.asdict(result))
            assert "found bad" not in table  # its outcome and its own reason
            assert "bad version" in table

            wanted = options(own, discover_s=2.0, skip_unready=True)
            nobody = await fleet.rollout(dataclasses.replace(wanted, digest="c" * 64))
            assert (nobody.action, nobody.counts["not_staged"]) == ("refused", 17)
            assert "no device is ready" in nobody.sentence

    with Broker(tmp_path) as own:
        asyncio.run(body(own))


async def gone(broker: Broker, name: str) -> None:
    """A device whose connection has ended, as its retained status tells."""
    async with client(broker, "fleet", topic="") as other:
        payload = b'{"state":"offline"}'
        await other.client.publish(f"gemctl/v1/plant/{name}/status", payload, 1, True)


def test_names_that_nobody_has(tmp_path: Path) -> None:
    """A site, a group, a model: each sentence says which there are."""

    async def fails(wanted: RolloutOptions, code: str, *parts: str) -> None:
        with pytest.raises(ApiError) as caught:
            await fleet.rollout(wanted)
        assert caught.value.code == code
        for part in parts:
            assert part in caught.value.message

    async def body(own: Broker) -> None:
        none = options(own, discover_s=1.0)
        await fails(none, "not_found", "site plant: no device is there", "check --site")
        async with devices(own, NAMES[:4]) as found:
            found[NAMES[3]].model = "commands"
            wrong = own.config("", "fleet", site="plnt")
            elsewhere = dataclasses.replace(none, broker=wrong)
            await fails(elsewhere, "not_found", "site plnt: no device is there, there are: plant;")
            with pytest.raises(ApiError, match="site plnt"):
                await fleet.status(wrong, discover_s=1.0)
            group = options(own, group="night")
            there = "group night: no device is in it; the groups of site plant are: even, odd;"
            await fails(group, "not_found", there)
            with pytest.raises(ApiError, match="group night"):
                await fleet.status(own.config("", "fleet"), "night")
            model = dataclasses.replace(none, name="smolm")
            there = "model smolm: no device has it; there are: commands, smollm; check --name"
            await fails(model, "not_found", there)
            await fails(dataclasses.replace(none, digest="B" * 64), "bad_request", "--digest")
            assert sum(service.asked_to for service in found.values()) == 0
        # an offline group is still a group, and its devices are not ready
        result = await fleet.rollout(options(own, group="odd", discover_s=1.0))
        assert result.action == "refused"
        assert [row.outcome for row in result.rows] == ["offline"] * 2
        listed = await fleet.status(own.config("", "fleet"), "odd")
        assert [(one.device, one.online) for one in listed] == [("d001", False), ("d003", False)]

    with Broker(tmp_path) as own:
        asyncio.run(body(own))


def test_progress_tells_how_far_it_is(tmp_path: Path) -> None:
    async def body(own: Broker) -> None:
        async with devices(own, NAMES[:12]) as found:
            found[order(NAMES[:12], NEW)[5]].fate = "again"
            said: list[Progress] = []
            result = await fleet.rollout(options(own, parallel=2), said.append)
            assert result.action == "done"
            assert {row.outcome for row in result.rows} == {"good"}
            done = [one.done for one in said]
            assert done == sorted(done)
            assert (said[-1].done, said[-1].total) == (12, 12)
            assert said[1].left_s is None  # nobody has ended yet
            left = [one.left_s for one in said if one.left_s is not None]
            assert left[0] > left[-1]
            lines = [text.progress(dataclasses.asdict(one)) for one in said]
            assert any("left]" in line for line in lines)
            assert lines[-1].endswith("[12 of 12]")

    with Broker(tmp_path) as own:
        asyncio.run(body(own))


def test_a_device_that_falls_silent(broker: Broker) -> None:
    async def body() -> None:
        names = NAMES[:6]
        async with devices(broker, names) as found:
            chosen = order(names, NEW)
            found[chosen[1]].fate = "mute"
            result = await fleet.rollout(
                options(
                    broker, timeout_s=1.0, parallel=1, percents=(50.0, 100.0), skip_unready=True
                )
            )
            assert result.action == "halt"
            outcomes = {row.device: row.outcome for row in result.rows}
            assert [outcomes[name] for name in chosen[:3]] == ["good", "lost", "pending"]
            found[chosen[2]].model = "other"  # it has no such model, so it is no part of it
            found[chosen[1]].fate = "good"
            result = await fleet.rollout(options(broker, percents=(100.0,), skip_unready=True))
            assert result.action == "done"
            outcomes = {row.device: row.outcome for row in result.rows}
            assert outcomes.pop(chosen[2]) == "absent"
            gone = {name for name, outcome in outcomes.items() if outcome == "offline"}
            assert {outcomes[name] for name in outcomes.keys() - gone} == {"good"}
            assert gone == set(outcomes) - set(names)  # from the tests before this one

    asyncio.run(body())


def test_switching_a_fleet(broker: Broker) -> None:
    async def body() -> None:
        async with devices(broker, NAMES[:5]) as found:
            wanted = {"method": "model.switch", "percents": (100.0,), "skip_unready": True}
            result = await fleet.rollout(options(broker, **wanted))
            assert result.action == "done"
            asked = [service.asked("model.switch") for service in found.values()]
            assert asked == [1] * 5

    asyncio.run(body())


def test_the_broker_is_lost_on_the_way(tmp_path: Path) -> None:
    async def body() -> None:
        own = Broker(tmp_path)
        own.start()
        try:
            async with devices(own, NAMES[:4]) as found:
                for service in found.values():
                    service.fate = "slow"
                task = asyncio.create_task(fleet.rollout(options(own, percents=(50.0,))))
                await until(lambda: any(service.asked_to for service in found.values()))
                own.stop(signal.SIGKILL)
                with pytest.raises(ApiError, match="run it again"):
                    await asyncio.wait_for(task, 10)
        finally:
            own.stop()
        with pytest.raises(ApiError, match="see that it runs"):
            await fleet.status(own.config("", "fleet"))

    asyncio.run(body())


def test_a_wrong_password_is_one_sentence(broker: Broker) -> None:
    config = broker.config("", "fleet")
    assert config.password_file is not None
    config.password_file.write_text("wrong")
    with pytest.raises(ApiError, match="check --username and --password-file"):
        asyncio.run(fleet.status(config))
    broker.password_file("fleet")
