"""What a long run holds does not grow with its rounds."""

import os
import textwrap
from importlib.util import find_spec

import forked
import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_resident_memory_stays_where_every_step_has_another_number_of_tokens(tiny_model):
    """As rounds have whose requests go on from a prefix."""
    script = f"""
        import ctypes
        import psutil
        from transformers import AutoModelForCausalLM
        from lit_rlsched.engines import VLLMEngine
        from lit_rlsched.engines.spec import EngineSpec
        from lit_rlsched.types import Request, Sampling

        policy = AutoModelForCausalLM.from_pretrained({tiny_model!r}).eval()
        engine, resident = VLLMEngine(), []
        engine.start(EngineSpec({tiny_model!r}, 4, 320, ()))
        for n in range(200):
            engine.sync_weights(policy.named_parameters(), n)
            prefix = tuple(range(4, 60)) * 5
            engine.submit(
                [Request(f"{{n}}/{{i}}", (5,), i, Sampling(300), prefix[:40 + n]) for i in range(3)]
            )
            for _ in range(3):
                engine.step()
            engine.abort([f"{{n}}/{{i}}" for i in range(3)])
            ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps for later is no growth
            resident.append(psutil.Process().memory_info().rss / 2**20)
        engine.close()
        # what malloc gives back to the system meanwhile is no shrinking
        print("grew by", max(resident[100:]) - max(resident[:100]))
    """
    process = forked.run(exec, textwrap.dedent(script), {}, timeout=280)
    assert process.returncode == 0, process.stderr
    assert float(process.stdout.rpartition("grew by")[2]) < 5, "MB in a hundred rounds"
