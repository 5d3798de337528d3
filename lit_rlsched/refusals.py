"""Distinguishes errors that tell the user what to change from bugs."""

import dis

_REFUSALS = (ValueError, TypeError, OSError, ImportError, RuntimeError)
_LIGHTNING_REFUSAL = "MisconfigurationException"  # by name: an engine's process has no Lightning
_PACKAGES = ("lit_rlsched", "lightning", "jsonargparse")


class RunFailed(RuntimeError):
    """A failure in the middle of a run that its message explains: no traceback is printed."""


def is_refusal(error: Exception) -> bool:
    """Whether an error tells the user what to change.

    It does if a `raise` statement in this package, Lightning or jsonargparse raised it. Errors from
    Python, torch or vLLM, failed assertions and errors from the user's own code are bugs.
    """
    if hasattr(error, "refusal"):  # it comes from an engine's process, which has decided
        return bool(error.refusal)
    known = isinstance(error, _REFUSALS) or type(error).__name__ == _LIGHTNING_REFUSAL
    last = error.__traceback__
    if not known or isinstance(error, NotImplementedError) or last is None:
        return False
    while last.tb_next is not None:
        last = last.tb_next
    package = str(last.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    operation = last.tb_frame.f_code.co_code[last.tb_lasti]
    return package in _PACKAGES and operation == dis.opmap["RAISE_VARARGS"]
