"""Prometheus' text: names and labels as planned, series that end, no library where it is off."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gemctl.errors import ApiError
from gemctl.show.metrics import MAX_MODELS, MAX_SENSORS, OUTCOMES, Metrics, Prometheus


def samples(metrics: Prometheus) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What the text says, by the library's own parser."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def feed(metrics: Metrics) -> None:
    """Every method once."""
    metrics.ttft("lm", 0.378)
    metrics.tokens("lm", 5)
    metrics.request("lm", "ok")
    metrics.kv_cache("lm", 256, 1024)
    metrics.model_info("lm", "ab12")
    metrics.worker_restart("lm")
    metrics.queue_length("lm", 3)
    metrics.flip("lm", 0.004)
    metrics.token_gap("lm", 0.012)
    metrics.temperatures({"tj-thermal": 61.5, "cv0-thermal": None})
    metrics.power({"VDD_IN": 9.8})
    metrics.throttle(2, 0.7, 75.0)
    metrics.event("slot.state")


def test_names_and_labels() -> None:
    metrics = Prometheus()
    feed(metrics)
    found = samples(metrics)
    model = (("model", "lm"),)
    assert found["gemctl_ttft_seconds_count", model] == 1
    assert found["gemctl_ttft_seconds_sum", model] == pytest.approx(0.378)
    assert found["gemctl_ttft_seconds_bucket", (("le", "0.3"), *model)] == 0
    assert found["gemctl_ttft_seconds_bucket", (("le", "0.5"), *model)] == 1
    assert found["gemctl_tokens_total", model] == 5
    assert found["gemctl_requests_total", (*model, ("outcome", "ok"))] == 1
    assert found["gemctl_kv_cache_used_ratio", model] == 0.25
    assert found["gemctl_model_info", (("digest", "ab12"), ("name", "lm"))] == 1
    assert found["gemctl_worker_restarts_total", model] == 1
    assert found["gemctl_queue_length", model] == 3
    assert found["gemctl_swap_flip_seconds_count", model] == 1
    assert found["gemctl_swap_max_token_gap_seconds_sum", model] == 0.012
    assert found["gemctl_temperature_celsius", (("zone", "tj-thermal"),)] == 61.5
    assert ("gemctl_temperature_celsius", (("zone", "cv0-thermal"),)) not in found
    assert found["gemctl_power_watts", (("rail", "VDD_IN"),)] == 9.8
    assert found["gemctl_throttle_level", ()] == 2
    assert found["gemctl_throttle_duty_ratio", ()] == 0.7
    assert found["gemctl_throttle_threshold_celsius", ()] == 75
    assert found["gemctl_events_total", (("kind", "slot.state"),)] == 1


def test_what_was_never_fed_is_no_zero() -> None:
    metrics = Prometheus()
    metrics.kv_cache("lm", 1, 0)
    found = samples(metrics)
    values = [value for (name, _), value in found.items() if name.startswith("gemctl_throttle")]
    assert len(values) == 3
    assert all(math.isnan(value) for value in values)
    assert "lm" not in metrics.text().decode()


def test_series_of_a_model_end_with_it() -> None:
    metrics = Prometheus()
    feed(metrics)
    for outcome in OUTCOMES:
        metrics.request("lm", outcome)
    metrics.tokens("other", 1)
    metrics.forget_model("lm")
    metrics.forget_model("lm")
    metrics.forget_model("never")
    text = metrics.text().decode()
    assert '"lm"' not in text
    assert 'model="other"' in text


def test_counts_of_a_model_outlast_its_unloading() -> None:
    metrics = Prometheus()
    feed(metrics)
    before = samples(metrics)
    metrics.unloaded("lm")
    metrics.unloaded("never")
    gone = {name for name, labels in set(before) - set(samples(metrics)) if labels}
    assert gone == {"gemctl_kv_cache_used_ratio", "gemctl_queue_length", "gemctl_model_info"}


def test_a_new_version_replaces_the_old_one() -> None:
    metrics = Prometheus()
    for digest in ("aa", "bb", "bb"):
        metrics.model_info("lm", digest)
    text = metrics.text().decode()
    assert "aa" not in text
    assert text.count('digest="bb"') == 1


def test_sensors_that_are_gone_have_no_series() -> None:
    metrics = Prometheus()
    metrics.temperatures({"a": 1.0, "b": 2.0})
    metrics.temperatures({"a": None, "b": 3.0})
    metrics.power({"x": 1.0})
    metrics.power({})
    assert {labels for (name, labels) in samples(metrics) if "celsius" in name and labels} == {
        (("zone", "b"),)
    }
    assert "rail=" not in metrics.text().decode()


def test_labels_are_bounded() -> None:
    metrics = Prometheus()
    for number in range(500):
        metrics.tokens(f"m{number}", 1)
        metrics.request(f"m{number}", f"outcome {number}")
        metrics.event(f"kind.{number}")
    metrics.temperatures({f"z{number}": 1.0 for number in range(500)})
    found = samples(metrics)

    def count(prefix: str) -> int:
        return sum(name.startswith(prefix) and bool(labels) for name, labels in found)

    assert count("gemctl_tokens_total") == MAX_MODELS
    assert count("gemctl_requests_total") == MAX_MODELS
    assert count("gemctl_temperature") == MAX_SENSORS
    assert count("gemctl_events_total") == 65  # and "other"
    metrics.forget_model("m0")
    metrics.tokens("new", 1)
    assert 'model="new"' in metrics.text().decode()


def test_odd_labels_are_escaped() -> None:
    metrics = Prometheus()
    metrics.temperatures({'a"b\\c\nd': 1.0})
    assert samples(metrics)["gemctl_temperature_celsius", (("zone", 'a"b\\c\nd'),)] == 1.0


def test_two_registries_know_nothing_of_each_other() -> None:
    first, second = Prometheus(), Prometheus()
    first.tokens("lm", 1)
    assert "lm" not in second.text().decode()


def test_without_figures_nothing_happens() -> None:
    metrics = Metrics()
    feed(metrics)
    metrics.forget_model("lm")
    assert metrics.text() is None


def test_both_have_the_same_methods() -> None:
    names = {name for name in vars(Metrics) if not name.startswith("_")}
    assert names <= set(vars(Prometheus))


def test_the_library_is_imported_late_and_missed_in_one_sentence() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from gemctl.show.metrics import Metrics, Prometheus\n"
        "from gemctl.errors import ApiError\n"
        "Metrics().tokens('lm', 1)\n"
        "try: Prometheus()\n"
        "except ApiError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "metrics: prometheus-client is not installed; install gembin-toolchain[metrics]\n"
    )
    assert ApiError("bad_request", "x").code == "bad_request"
