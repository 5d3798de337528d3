"""Which errors tell the user what to change, and which are bugs."""

import dis
from types import TracebackType

_ON_PURPOSE = (ValueError, TypeError, OSError, ImportError, RuntimeError)
_OF_LIGHTNING = "MisconfigurationException"  # by its name: an engine's process has no Lightning
_SPEAK_TO_USERS = ("lit_rlsched", "lightning", "jsonargparse")


def is_refusal(error: Exception) -> bool:
    """Whether an error tells the user what to change, and is no bug.

    It does where it was raised by a `raise` in this package or in Lightning: what Python, torch or
    vLLM raise by themselves, an `assert` that fails, and the user's own code are not among these.
    """
    if hasattr(error, "__notes__"):  # the traceback of another process, which has judged it
        return getattr(error, "refusal", False)
    known = isinstance(error, _ON_PURPOSE) or type(error).__name__ == _OF_LIGHTNING
    if not known or isinstance(error, NotImplementedError):
        return False
    last = _innermost(error.__traceback__)
    if last is None:
        return False
    module = str(last.tb_frame.f_globals.get("__name__", ""))
    operation = last.tb_frame.f_code.co_code[last.tb_lasti]
    return module.partition(".")[0] in _SPEAK_TO_USERS and operation == dis.opmap["RAISE_VARARGS"]


def _innermost(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames
