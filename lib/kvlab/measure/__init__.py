"""The device at hand: calibrated, profiled, and set beside the prediction of the cost model."""

from kvlab.measure.bench import Bench, Case, Measured, bench, report
from kvlab.measure.calibrate import Calibrator, calibrate, default_dtypes
from kvlab.measure.profile import OperatorTime, PhaseProfile, Profile, profile
from kvlab.measure.steps import calibrate_steps

__all__ = [
    "Bench", "Calibrator", "Case", "Measured", "OperatorTime", "PhaseProfile", "Profile", "bench", "calibrate",
    "calibrate_steps", "default_dtypes", "profile", "report",
]  # fmt: skip
