"""`killed_export.py CHECKPOINT FOLDER...`: exports in a process that is killed meanwhile.

The name of a folder says at which place of the export.
"""

import os
import signal
import sys
from pathlib import Path

from huggingface_hub import ModelCard
from transformers import modeling_utils

from lit_rlsched.run.saving.export import export


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def cut_off(state_dict, filename, metadata=None):
    """Write half of the file."""
    save(state_dict, filename, metadata=metadata)
    os.truncate(filename, os.path.getsize(filename) // 2)
    die()


save = modeling_utils.safe_save_file


def main(ckpt_path, out):
    if out.name == "weights":
        modeling_utils.safe_save_file = cut_off
    else:
        assert out.name == "card"
        ModelCard.save = die
    export(ckpt_path, str(out))


if __name__ == "__main__":
    ckpt_path, *folders = sys.argv[1:]
    for folder in map(Path, folders):
        if (pid := os.fork()) == 0:
            try:
                main(ckpt_path, folder)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, folder
