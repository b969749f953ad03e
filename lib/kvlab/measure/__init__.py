"""The device at hand: calibrated, profiled, and set beside the prediction of the cost model."""

from kvlab.measure.bench import Bench, Case, Measured, bench, report
from kvlab.measure.calibrate import Calibrator, calibrate, default_dtypes
from kvlab.measure.profile import OperatorTime, PhaseProfile, Profile, profile

__all__ = [
    "Bench", "Calibrator", "Case", "Measured", "OperatorTime", "PhaseProfile", "Profile", "bench", "calibrate",
    "default_dtypes", "profile", "report",
]  # fmt: skip
