"""Memory that a run will need, computed before anything is loaded: `lit-rlsched estimate`."""

from lit_rlsched.cli.estimate.ledger import Item, Ledger, counted_peaks
from lit_rlsched.cli.estimate.live import device_memory
from lit_rlsched.cli.estimate.report import report
from lit_rlsched.cli.estimate.run import PlannedRun

__all__ = ["Item", "Ledger", "PlannedRun", "counted_peaks", "device_memory", "report"]
