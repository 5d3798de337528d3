"""Process of one check: `python -m benchmarks.gpu_check.child FUNCTION ...`."""

import faulthandler
import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.gpu_check.findings import Findings, Skip
from benchmarks.gpu_check.setting import Setting


def main(function: str, arguments: str, setting: str, path: str) -> int:
    """Run a check.

    Args:
        function: `module:function`; called with a `Setting`, `Findings` and `arguments`.
        arguments: Keyword arguments of the function as JSON.
        setting: The setting as JSON.
        path: File for the findings.
    """
    found = Findings(Path(path))
    found.write()
    module, _, name = function.partition(":")
    try:
        getattr(import_module(module), name)(
            Setting(**json.loads(setting)), found, **json.loads(arguments)
        )
    except Skip as why:
        found.skip(str(why))
    except BaseException:  # an exit of the command line is a failure, too
        found.error = traceback.format_exc()
        print(found.error, file=sys.stderr)
    found.done = True
    found.write()
    return 1 if found.error else 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.path.insert(0, os.getcwd())
    sys.exit(main(*sys.argv[1:]))
