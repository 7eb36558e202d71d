"""``trace.fork``: the question "what if" put to a simulated run."""

from __future__ import annotations

import minibatch
from minibatch.workload import RequestSpec


def test_a_trace_forks_and_its_past_stays() -> None:
    requests = [RequestSpec(f"r{i}", 0.0, 40, 30) for i in range(12)]
    tight = {"num_gpu_blocks": 24, "max_num_seqs": 8}
    trace = minibatch.simulate(requests, "a100-80gb", "llama-2-7b", "continuous", tight)
    assert trace.summary["num_preemptions"] > 0
    step = next(record.step for record in trace if record.preempted)
    other = trace.fork(step, num_gpu_blocks=200)
    assert other.steps[:step] == trace.steps[:step]
    assert other.summary["num_preemptions"] == 0
    assert other.summary["num_finished"] == trace.summary["num_finished"] == 12
    assert len(other) < len(trace)
