"""Random traffic on ranks that are processes: the bare loop's tokens, and all pages back, over gloo and between GPUs.

The engines differ in what each switch of chapter 9 selects; each serves all scenarios, one behind the other, so its
tree has the prefixes of those before. MINISGL_SCENARIOS=200 tries that many on each, drawn anew.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.group import open_engine
from tests.engine.scenarios import FRESH, scenario, scenarios
from tests.engine.traffic import LONGEST, family, serve
from tests.helpers import hf_twin

ENGINES: dict[str, dict[str, Any]] = {
    "gloo": {"device": "cpu", "graphs": "off"},
    "nccl": {"device": "cuda", "graphs": "off"},
    "nccl in graphs": {"device": "cuda", "graphs": "lazy", "overlap": "on"},
    "peer memory in graphs": {"device": "cuda", "graphs": "lazy", "overlap": "on", "custom_all_reduce": True},
}
EIGHT_HEADS = {"hidden_size": 40, "num_heads": 8, "intermediate_size": 56}  # which divide by 2, 4 and 8
TIGHT = {"page_size": 3, "kv_pages": 21, "max_batch_tokens": 16, "max_running_requests": 8, "max_model_len": 60}


def ranks(name: str, tp: int) -> Any:
    needs = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < tp, reason=f"needs {tp} NVIDIA GPUs")]
    return pytest.param(name, tp, id=f"{name} {tp}", marks=needs if ENGINES[name]["device"] == "cuda" else [])


@pytest.mark.parametrize(
    ("name", "tp"), [ranks("gloo", 2), *(ranks(n, tp) for n in [*ENGINES][1:] for tp in (2, 4, 8))]
)
def test_any_traffic_on_rank_processes_gets_the_bare_loops_tokens(name, tp, tmp_path: Path):
    known = family(**EIGHT_HEADS)
    hf_twin(known.model).save_pretrained(tmp_path)
    engine = open_engine(EngineConfig(model=str(tmp_path), dtype="float32", tp=tp, **TIGHT, **ENGINES[name]), tmp_path)
    first = Random().randrange(10**9) if FRESH else 0
    try:
        for seed in range(first, first + scenarios(20)):
            case = scenario(Random(seed), len(known.prompts), LONGEST)
            print(f"scenario {seed}: {case}")  # pytest shows the last one if it fails
            serve(engine, case, known)
    finally:
        engine.close()
