"""A rank that a launcher has started on a host: `node_run.py FOLDER RUN`.

The run is JSON, as in `ranks/ranked_run.py`, which does it. The folder is on the rank's own host.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "ranks")]

import ranked_run  # noqa: E402
import torch  # noqa: E402

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, run = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    ranked_run.run(folder, **json.loads(run))
