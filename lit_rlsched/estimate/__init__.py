"""Memory that a run will need, computed before anything is loaded: `lit-rlsched estimate`."""

from lit_rlsched.estimate.counted import counted_peaks
from lit_rlsched.estimate.ledger import Item, Ledger
from lit_rlsched.estimate.report import device_memory, report
from lit_rlsched.estimate.run import PlannedRun

__all__ = ["Item", "Ledger", "PlannedRun", "counted_peaks", "device_memory", "report"]
