"""The device at hand: calibrated, profiled, and set beside the prediction of the cost model."""

from kvlab.measure.bench import Bench, Case, Measured, bench, report
from kvlab.measure.calibrate import Calibrator, calibrate, default_dtypes

__all__ = ["Bench", "Calibrator", "Case", "Measured", "bench", "calibrate", "default_dtypes", "report"]
