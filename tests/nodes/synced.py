"""Syncs weights into engines on another host, and prints what each sync sends: bytes and seconds.

`synced.py MODEL DTYPE ENGINES SYNCS`, on the trainer's host. The engines are where the Ray cluster
has the resource `far`.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lit_rlsched.engines import RayEngine, TransformersEngine
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineSpec


def sent():
    """Bytes that this host has sent to others."""
    rows = dict(row.split(":") for row in Path("/proc/net/dev").read_text().splitlines()[2:])
    return int({name.strip(): row for name, row in rows.items()}["eth0"].split()[8])


def main(folder, dtype, engines, syncs):
    dtype = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    engine = RayEngine(TransformersEngine(), resources={"CPU": 0.5, "far": 1.0})
    pool = EnginePool.of(engine, int(engines)) if int(engines) > 1 else engine
    pool.start(EngineSpec(folder, 2 * int(engines), 64, (1,), dtype))
    try:
        weights = sum(p.nbytes for _, p in model.named_parameters())
        for version in range(int(syncs)):
            before, began = sent(), time.perf_counter()
            pool.sync_weights(model.named_parameters(), version)
            seconds = time.perf_counter() - began
            print(json.dumps({"of": weights, "bytes": sent() - before, "seconds": seconds}))
    finally:
        pool.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
