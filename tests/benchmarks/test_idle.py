"""What is read from a profile: hand-made traces, and on a GPU a real one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import idle
from benchmarks.idle import Span
from minisgl.config import EngineConfig
from minisgl.llm import LLM
from tests.helpers import tiny_config

BASE = 1_000_000_000  # of the trace's clock, in nanoseconds


def spans(*pairs):
    return [Span("kernel", start, end - start) for start, end in pairs]


@pytest.mark.parametrize(
    ("intervals", "busy"),
    [
        ([], 0),
        ([(10, 20), (30, 40)], 20),
        ([(10, 20), (20, 40)], 30),
        ([(10, 30), (20, 40)], 30),  # kernels of two streams, or one that starts before its predecessor ended
        ([(10, 50), (20, 30), (45, 60)], 50),
        ([(30, 40), (10, 20)], 20),
        ([(-10, 5), (95, 200)], 10),  # what lies outside counts for nothing
        ([(-10, 200)], 100),
        ([(120, 130)], 0),
    ],
)
def test_time_is_counted_once_however_kernels_overlap(intervals, busy):
    assert 100 - sum(idle.gaps_us(spans(*intervals), 0, 100)) == busy


def test_each_gap_is_told_apart():
    assert idle.gaps_us(spans((10, 20), (20, 40), (35, 60), (90, 95)), 0, 100) == [10, 30, 5]


def event(cat, name, ts, dur, correlation):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def trace(steps, first=0, ahead=0):
    """Steps of 100 µs: a launch of 5 µs, then a wait of 60; two kernels of 30 µs, which begin `ahead` µs later."""
    events = [{"ph": "M", "name": "process_name"}]
    for i in range(steps):
        start = first + 100 * i
        events += [
            event("cuda_runtime", "cudaGraphLaunch", start + 1, 5, i),
            event("cuda_runtime", "cudaEventSynchronize", start + 10, 60, 1000 + i),
            event("kernel", "void at::native::first<float, 4>(int)", start + 20 + ahead, 30, i),
            event("kernel", "second", start + 50 + ahead, 30, i),
            event("gpu_memcpy", "Memcpy DtoH", start + 80 + ahead, 15, 2000 + i),
        ]
    return {"baseTimeNanoseconds": BASE, "traceEvents": events}


def marks(steps, first=0):
    return [BASE + 1000 * (first + 100 * i) for i in range(steps + 1)]


def test_a_step_owns_the_kernels_that_it_asked_for_though_they_run_later():
    found = idle.read(trace(8, ahead=120), marks(8))
    [first, second] = found.step(3).kernels
    assert (first.name, first.start, first.us) == ("at::native::first", 440, 30)
    assert second.start == 470


def test_the_idle_share_is_the_part_of_the_steps_without_a_kernel():
    found = idle.summary(idle.read(trace(8), marks(8)))
    assert found["idle_share"] == pytest.approx(0.4)  # a copy is no kernel
    assert found["starved_share"] == pytest.approx(0.4)  # it is one gap of 40 µs
    assert (found["kernels_per_step"], found["gpu_step_ms"], found["kernel_ms"]) == pytest.approx((2, 0.1, 0.06))


def test_gaps_as_short_as_the_gpus_own_are_idle_but_not_starved():
    short = trace(8)
    for e in short["traceEvents"]:
        if e["name"] == "second":
            e |= {"ts": e["ts"] + 3, "dur": 43}  # 3 µs behind the first, 24 before the next step's
    found = idle.summary(idle.read(short, marks(8)))
    assert found["idle_share"] == pytest.approx(0.27)
    assert found["starved_share"] == pytest.approx(0.24)


def test_the_hosts_time_is_that_in_which_it_does_not_wait():
    assert idle.summary(idle.read(trace(8), marks(8)))["host_ms"] == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("name", "waited"),
    [
        ("cudaStreamSynchronize", 40),
        ("cudaEventSynchronize", 40),
        ("cudaLaunchKernel", 0),
        ("cudaEventRecord", 0),
        ("cudaMemcpyAsync", 40 - idle.COPY_US),
    ],
)
def test_a_wait_is_told_from_work(name, waited):
    assert idle.waited_us(Span(name, 0, 40)) == waited


def test_without_the_hosts_calls_a_kernel_belongs_to_the_step_in_which_it_ran():
    some = trace(4)
    some["traceEvents"] = [e for e in some["traceEvents"] if e.get("cat") != "cuda_runtime"]
    assert [kernel.start for kernel in idle.read(some, marks(4)).step(2).kernels] == [220, 250]


def test_the_steps_in_which_the_profiler_still_starts_do_not_count():
    late = trace(8)
    late["traceEvents"] = [e for e in late["traceEvents"] if e.get("cat") != "kernel" or e["ts"] > 100]
    assert idle.summary(idle.read(late, marks(8)))["idle_share"] == pytest.approx(0.4)


def test_a_kernel_whose_launch_was_not_seen_goes_with_the_one_before():
    some = trace(4)
    for e in some["traceEvents"]:
        if e["name"] == "second":
            e["args"] = {}
    assert [kernel.name for kernel in idle.read(some, marks(4)).step(2).kernels] == ["at::native::first", "second"]


def test_a_trace_without_kernels_is_refused():
    with pytest.raises(ValueError, match="no kernel"):
        idle.read({"traceEvents": [event("cuda_runtime", "cudaLaunchKernel", 1, 2, 3)]}, marks(1))


def test_a_timeline_is_one_step_from_its_start_on_the_host():
    step = idle.timeline(idle.read(trace(8), marks(8)), 5)
    assert step["host_step_us"] == 100
    assert step["kernels"] == {"name": ["at::native::first", "second"], "start_us": [20, 50], "us": [30, 30]}
    assert step["calls"]["name"] == ["cudaGraphLaunch", "cudaEventSynchronize"]
    json.dumps(step)


def test_the_profilers_clock_is_that_of_the_marks(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as record:
        torch.ones(8).sum()  # what a first operation sets up is over
        before = time.time_ns()
        time.sleep(0.01)
        torch.ones(8).cumsum(0)
        time.sleep(0.01)
        after = time.time_ns()
    record.export_chrome_trace(str(tmp_path / "trace.json"))
    found = json.loads((tmp_path / "trace.json").read_text())
    [ts] = [e["ts"] for e in found["traceEvents"] if e.get("name") == "aten::cumsum"]
    assert before < found.get("baseTimeNanoseconds", 0) + 1000 * ts < after


def test_a_cpu_has_no_idle_share(tiny_folder):
    with LLM(EngineConfig(model=str(tiny_folder), device="cpu")) as llm:
        assert idle.measure(llm, batch=2, prompt=5) is None


class FakeProfiler:
    """Sees a kernel of 50 µs every 100 µs while it runs."""

    def __init__(self, activities):
        self.times = []

    def start(self):
        self.times.append(time.time_ns())

    stop = start

    def export_chrome_trace(self, path):
        start, end = self.times  # once each
        events = [event("kernel", "some", (ns - BASE) / 1000, 50, 0) for ns in range(start, end, 100_000)]
        Path(path).write_text(json.dumps({"baseTimeNanoseconds": BASE, "traceEvents": events}))


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_the_profile_covers_steps_of_all_requests_and_ends_them(tiny_folder, monkeypatch, overlap):
    monkeypatch.setattr(idle, "profile", FakeProfiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with LLM(EngineConfig(model=str(tiny_folder), device="cpu", overlap=overlap, max_batch_tokens=16)) as llm:
        llm.device = torch.device("cuda")
        found = idle.profile_decode(llm, batch=3, prompt=20)
        llm.device = torch.device("cpu")
        assert llm.stats()["requests_running"] == 0
        most = 3 * idle.answer_tokens(3, 20, idle.STEPS)
        assert llm.stats()["output_tokens"] < most, "they ran to their ends"
    assert len(found.marks) == idle.STEPS + 1
    assert found.marks == sorted(found.marks)
    assert found.step_ms > 0
    assert idle.summary(found)["idle_share"] == pytest.approx(0.5, abs=0.1)


def test_more_requests_than_run_side_by_side_give_no_profile(tiny_folder, monkeypatch):
    monkeypatch.setattr(idle, "profile", FakeProfiler)
    with LLM(EngineConfig(model=str(tiny_folder), device="cpu", max_running_requests=2)) as llm:
        llm.device = torch.device("cuda")
        found = idle.profile_decode(llm, batch=3, prompt=20)
        llm.device = torch.device("cpu")
    assert found is None


@pytest.mark.gpu
@pytest.mark.parametrize("chapter", [7, 8])
def test_a_decode_step_on_a_gpu_is_seen(tmp_path, chapter):
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    from tests.helpers import hf_json

    (tmp_path / "config.json").write_text(json.dumps(hf_json(tiny_config())))
    config = EngineConfig.chapter(
        chapter, model=str(tmp_path), device="cuda", dtype="float32", random_weights=True, kv_pages=400
    )
    with LLM(config) as llm:
        found = idle.profile_decode(llm, batch=4, prompt=20)
    assert found is not None
    figures = idle.summary(found)
    assert 0 <= figures["idle_share"] < 1
    assert figures["kernels_per_step"] >= 5
    assert len(idle.timeline(found)["kernels"]["name"]) == pytest.approx(figures["kernels_per_step"], abs=3)
