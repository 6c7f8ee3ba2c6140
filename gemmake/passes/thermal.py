"""thermal: the throttle temperature that the artifact carries."""

from __future__ import annotations

from gemmake.hdf import Hdf
from gemrun.format import spec


def policy(hdf: Hdf, threshold: float | None) -> spec.Thermal:
    """THRM from `--temperature-threshold` (°C), or the target's own policy without it."""
    chosen = threshold if threshold is not None else hdf.throttle_c
    return spec.Thermal(
        threshold_c=chosen or 0.0,
        hysteresis_c=hdf.policy.hysteresis_c,
        device_max_c=hdf.policy.target_temp_c or 0.0,
    )
