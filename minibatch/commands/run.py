"""``minibatch run``: prompts in, answers out, and every iteration to watch."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minibatch.commands.knobs import add_knobs, given
from minibatch.config import EngineConfig
from minibatch.errors import InvalidRequestError
from minibatch.outputs import RequestOutput
from minibatch.record import one_line
from minibatch.sampling_params import SamplingParams

EXAMPLES = """\
examples:
  minibatch run "What is a KV cache?" "Name three rivers." --show-steps
  minibatch run --file prompts.txt --policy static --max-tokens 32 --trace run.jsonl.gz
  echo "Tell me a joke." | minibatch run --temperature 0 --json
  minibatch run "Hi" --num-gpu-blocks 12 --block-size 4 --preemption-mode swap --show-steps
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="answer prompts, all in one batch",
        description="Answer prompts with continuous batching (or another policy).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="'-' reads standard input")
    parser.add_argument("--model", default="smollm2-135m", help="see 'minibatch models'")
    parser.add_argument("--file", type=Path, help="a prompt a line")
    parser.add_argument("--raw", action="store_true", help="continue the text, no chat template")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="record to .jsonl or .jsonl.gz")
    parser.add_argument("--show-steps", action="store_true", help="print a line an iteration")
    parser.add_argument("--json", action="store_true", help="print an object a request")
    add_knobs(parser, "engine", EngineConfig, skip={"model"})
    add_knobs(parser, "sampling", SamplingParams, skip={"stream", "seed"})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from minibatch.llm import LLM

    prompts = read_prompts(args)
    params = SamplingParams(**{"max_tokens": 64, **given(args, SamplingParams)})
    keep = 1000 if args.trace else None  # the file has them all
    knobs = {**given(args, EngineConfig)}
    knobs.pop("model", None)
    with LLM(args.model, **knobs) as llm:
        llm.engine.keep_records = keep
        if args.trace:
            llm.engine.record_to(args.trace)
        tokenizer = llm.engine.tokenizer
        if args.raw or tokenizer is None or tokenizer.chat_template is None:
            ids = llm.submit(prompts, [params] * len(prompts))
        else:
            chats = [
                tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
                for prompt in prompts
            ]
            ids = llm.submit(chats, [params] * len(prompts))
        blocks = llm.engine.config.num_gpu_blocks
        for record in llm.run():
            if args.show_steps:
                print(one_line(record, blocks), file=sys.stderr if args.json else sys.stdout)
        for prompt, request_id in zip(prompts, ids, strict=True):
            report(prompt, llm.engine.output(request_id), args.json)
        if not args.json:
            print(total_line(llm.trace.summary))
    return 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """From arguments, a file and standard input, in that order."""
    prompts: list[str] = []
    for prompt in args.prompts:
        prompts += sys.stdin.read().splitlines() if prompt == "-" else [prompt]
    if args.file:
        try:
            prompts += args.file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InvalidRequestError(f"--file {args.file}: {error.strerror}.") from error
    if not args.prompts and not args.file and not sys.stdin.isatty():
        prompts += sys.stdin.read().splitlines()
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise InvalidRequestError("no prompts: give some, or --file, or pipe them in.")
    return prompts


def report(prompt: str, output: RequestOutput, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**asdict(output), "prompt": prompt}, ensure_ascii=False))
        return
    print(f"\n[{output.request_id}] {prompt}")
    for completion in output.outputs:
        print(completion.text.strip())
    metrics = output.metrics
    if metrics is not None and metrics.ttft is not None:
        tpot = f", {1e3 * metrics.tpot:.0f} ms/token after it" if metrics.tpot else ""
        print(
            f"    {metrics.num_generated_tokens} tokens ({output.outputs[0].finish_reason}), "
            f"first after {1e3 * metrics.ttft:.0f} ms{tpot}"
        )


def total_line(summary: dict[str, Any]) -> str:
    seconds = summary["end_s"] - (summary["start_s"] or 0.0)
    rate = summary["num_generated_tokens"] / seconds if seconds > 0 else 0.0
    return (
        f"\n{summary['num_finished']} requests, {summary['num_generated_tokens']} tokens in "
        f"{summary['num_steps']} iterations, {seconds:.2f} s: {rate:.1f} generated tok/s"
    )
