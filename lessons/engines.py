"""Engines for lessons: the real scheduler and engine, on a virtual clock, fed by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minibatch.clock import VirtualClock
from minibatch.cost_model import CostModel
from minibatch.engine import Engine
from minibatch.executor.simulated import SimulatedExecutor
from minibatch.hardware import hardware
from minibatch.model.presets import preset
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import Scheduler
from minibatch.simulation import Recipe, Simulation, scheduler_config
from minibatch.trace import Trace
from minibatch.workload import RequestSpec, as_workload

if TYPE_CHECKING:
    from minibatch.llm import LLM


def cost_model() -> CostModel:
    """The tiny model on an A100: what all lessons without a real model run on."""
    return CostModel(preset("tiny"), hardware("a100-80gb"))


def new_engine(policy: str = "unified", **knobs: Any) -> Engine:
    """An engine to which ``submit`` gives requests, and that you step yourself."""
    model = cost_model()
    config = scheduler_config(policy, model, {"num_gpu_blocks": 100, "max_model_len": 64, **knobs})
    clock = VirtualClock()
    engine = Engine(config, SimulatedExecutor(model, clock, config.block_size), clock=clock)
    engine.trace.meta.source = "simulated"
    engine.trace.meta.hardware = model.hardware.name
    return engine


def submit(engine: Engine, name: str, length: int, prompt_len: int = 1) -> None:
    """Queue a request that will say exactly ``length`` tokens."""
    engine.add_request(
        name,
        prompt_token_ids=[1] * prompt_len,
        sampling_params=SamplingParams(max_tokens=length, ignore_eos=True),
    )


def run_with(
    scheduler: type[Scheduler], requests: Iterable[RequestSpec], knobs: dict[str, Any]
) -> Trace:
    """A simulated run under a scheduler of your own; its class name is the trace's policy."""
    model = cost_model()
    config = scheduler_config("continuous", model, knobs)
    simulation = Simulation(Recipe(as_workload(requests), model, ((0, config),)))
    simulation.engine.scheduler = scheduler(config)
    simulation.engine.trace.meta.policy = scheduler.__name__
    return simulation.finish()


def chat_prompts(llm: LLM, questions: Iterable[str]) -> list[dict[str, Any]]:
    """Questions as a chat model wants them: in its own template, as token ids."""
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    conversations = [[{"role": "user", "content": question}] for question in questions]
    return [{"prompt_token_ids": tokenizer.apply_chat_template(c)} for c in conversations]


def so_far(llm: LLM, ids: Iterable[str], width: int = 60) -> None:
    """Print what each request has said by now, a line each."""
    for name in ids:
        text = llm.engine.output(name).outputs[0].text.replace("\n", " ")
        print(f"{name}: {text[:width]}")


def only(trace: Trace, first: int = 0) -> Trace:
    """A copy of a trace from a step on: the engine may go on meanwhile."""
    return Trace(trace.meta, list(trace.steps[first:]))


class FlopMeter:
    """Counts what really goes through a model's matrices: two FLOPs for each number of a matrix
    and each token that it sees. Attention's dot products and the output layer are left out.

    Args:
        engine: one with a real model.
    """

    def __init__(self, engine: Engine) -> None:
        self.flops = 0
        layers = engine.executor.model.layers  # type: ignore[attr-defined]
        for module in layers.modules():
            if type(module).__name__.endswith("Linear"):
                module.register_forward_hook(self._count)

    def _count(self, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        self.flops += 2 * inputs[0].numel() * output.shape[-1]

    def take(self) -> int:
        """What was counted since the last call."""
        flops, self.flops = self.flops, 0
        return flops
