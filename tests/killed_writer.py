"""`killed_writer.py FILE...`: overwrites each checkpoint in a process that is killed meanwhile.

The name of a file says at which place of the writing. The temporary directory is on another file
system where the caller sees to it.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from lit_rlsched.run.saving import checkpoints


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


class Dying:
    """Dies once a mebibyte is on the disk."""

    def __init__(self, file):
        self.file, self.flush = file, file.flush

    def write(self, data):
        self.file.write(data)
        self.flush()
        return die() if self.file.tell() > 1 << 20 else len(data)


def main(path, place):
    io = checkpoints.AtomicCheckpointIO()
    if place == "write":
        save = torch.save
        torch.save = lambda contents, file: save(contents, Dying(file))
    elif place in ("fsync", "replace"):
        setattr(os, place, die)
    io.save_checkpoint(
        {
            "state_dict": {"weight": torch.ones(1 << 20)},
            "pytorch-lightning_version": "2.6.6",
            "global_step": 2,
        },
        path,
    )
    die()


if __name__ == "__main__":
    for path in sys.argv[1:]:
        if (pid := os.fork()) == 0:
            try:
                main(path, Path(path).stem)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
