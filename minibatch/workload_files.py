"""Workloads from files: public traces of real services, and our own format.

==========  =========================================  ==========================================
format      file                                       licence of the published data
==========  =========================================  ==========================================
azure       AzureLLMInferenceTrace_{conv,code}.csv     CC-BY 4.0, cite Splitwise (ISCA 2024)
burstgpt    BurstGPT_1.csv                             CC-BY 4.0
mooncake    conversation_trace.jsonl, optionally .gz   none named (repository: Apache-2.0)
sharegpt    ShareGPT_V3_unfiltered_cleaned_split.json  scraped chats: read, do not redistribute
minibatch   JSON Lines written by ``save_workload``
==========  =========================================  ==========================================

Only ShareGPT holds text; the others are lengths and times.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import cycle, islice
from pathlib import Path
from typing import IO, Any

from minibatch.errors import ConfigError, MinibatchError
from minibatch.workload import (
    RequestSpec,
    Segment,
    Workload,
    as_workload,
    spec_from_row,
    spec_to_row,
)

FORMAT = "minibatch-workload"
MOONCAKE_BLOCK = 512  # tokens behind each hash id
TICKS_A_SECOND = 10**7  # Azure's times have seven digits after the point


class WorkloadFormatError(MinibatchError, ValueError):
    """A workload file that is not what it should be; names the file, the line and the reason."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason.rstrip('.')}.")
        self.line = line
        self.reason = reason


def read_workload(path: str | Path, **options: Any) -> Workload:
    """Read any of the formats, recognised by how the file begins.

    ``options`` go to the format's own reader (``read_sharegpt`` needs ``encode``).

    Raises:
        WorkloadFormatError: none of them, or a bad line.
    """
    path = Path(path)
    try:
        with _open(path) as file:
            head = file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadFormatError(path, 1, f"cannot be read: {error}") from error
    line = head.split("\n", 1)[0]
    for sign, reader in (
        (line.startswith("TIMESTAMP,ContextTokens"), read_azure),
        (line.startswith("Timestamp,Model"), read_burstgpt),
        ('"hash_ids"' in line, read_mooncake),
        (f'"{FORMAT}"' in line, load_workload),
        ('"conversations"' in head, read_sharegpt),
    ):
        if sign:
            return reader(path, **options)
    raise WorkloadFormatError(path, 1, f"{line[:60]!r} begins none of the formats that are known")


# -- our own --------------------------------------------------------------------------------------


def save_workload(workload: Workload, path: str | Path) -> Path:
    """Write JSON Lines (gzip if the name ends in .gz): a head line, then one request a line."""
    path = Path(path)
    head = {"format": FORMAT, "name": workload.name, "note": workload.note}
    with _open(path, "wt") as file:
        for row in (head, *map(spec_to_row, workload)):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def load_workload(path: str | Path) -> Workload:
    """Read what ``save_workload`` wrote.

    Raises:
        WorkloadFormatError: line and reason.
    """
    path = Path(path)
    requests: list[RequestSpec] = []
    head: dict[str, Any] = {}
    for number, row in _json_lines(path):
        if number == 1:
            head = row
            if head.get("format") != FORMAT:
                raise WorkloadFormatError(path, 1, f"expected a head line of format {FORMAT}")
            continue
        try:
            requests.append(spec_from_row(row))
        except ConfigError as error:
            raise WorkloadFormatError(path, number, str(error)) from error
    try:
        return as_workload(
            Workload(tuple(requests), head.get("name", path.stem), head.get("note", ""))
        )
    except ConfigError as error:
        raise WorkloadFormatError(path, len(requests) + 1, str(error)) from error


# -- Azure LLM inference trace 2023 (and 2024, which has the same columns) ------------------------


def read_azure(path: str | Path) -> Workload:
    """``TIMESTAMP,ContextTokens,GeneratedTokens``. Times count from the first row, to 100 ns.

    Raises:
        WorkloadFormatError: line and reason.
    """
    path = Path(path)
    columns = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    requests: list[RequestSpec] = []
    first = 0
    for line, row in _csv_rows(path, columns):
        try:
            ticks = _ticks(row["TIMESTAMP"])
            first = first if requests else ticks
            requests.append(
                RequestSpec(
                    f"r{len(requests)}",
                    (ticks - first) / TICKS_A_SECOND,
                    _whole(row, "ContextTokens"),
                    _whole(row, "GeneratedTokens"),
                )
            )
        except ValueError as error:
            raise WorkloadFormatError(path, line, str(error)) from error
    return Workload(tuple(requests), path.stem)


_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?")


def _ticks(timestamp: str) -> int:
    """Tenths of microseconds. (``datetime`` keeps six digits, and Python 3.10 refuses more.)"""
    match = _TIMESTAMP.fullmatch(timestamp.strip())
    if match is None:
        raise ValueError(f"{timestamp!r} is not a time like 2023-11-16 18:15:46.6805900")
    moment, fraction = match.groups(default="")
    seconds = int((datetime.fromisoformat(moment) - datetime(2000, 1, 1)).total_seconds())
    return seconds * TICKS_A_SECOND + int(fraction[:7].ljust(7, "0"))


# -- BurstGPT -------------------------------------------------------------------------------------


def read_burstgpt(path: str | Path, model: str | None = None) -> Workload:
    """``Timestamp,Model,Request tokens,Response tokens,...``. Times count from the first row kept.

    Rows without response tokens are failed requests, and left out.

    Args:
        model: keep only rows of this model (``"GPT-4"``, as vLLM's benchmark does).

    Raises:
        WorkloadFormatError: line and reason.
    """
    path = Path(path)
    columns = ["Timestamp", "Model", "Request tokens", "Response tokens"]
    requests: list[RequestSpec] = []
    first = 0.0
    failed = 0
    for line, row in _csv_rows(path, columns):
        try:
            if model is not None and row["Model"] != model:
                continue
            output_len = _whole(row, "Response tokens", least=0)
            if output_len == 0:
                failed += 1
                continue
            time = float(row["Timestamp"])
            first = first if requests else time
            prompt_len = _whole(row, "Request tokens")
            requests.append(RequestSpec(f"r{len(requests)}", time - first, prompt_len, output_len))
        except ValueError as error:
            raise WorkloadFormatError(path, line, str(error)) from error
    note = f"{failed} failed requests left out" if failed else ""
    return Workload(tuple(requests), path.stem, note)


# -- Mooncake -------------------------------------------------------------------------------------


def read_mooncake(path: str | Path) -> Workload:
    """``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` a line.

    Each hash id stands for 512 tokens (the last one for the rest): equal ids, equal tokens. The
    only one of these traces that says which prompts begin alike.

    Raises:
        WorkloadFormatError: line and reason.
    """
    path = Path(path)
    requests: list[RequestSpec] = []
    for line, row in _json_lines(path):
        try:
            prompt_len = _whole(row, "input_length")
            hash_ids = row.get("hash_ids")
            if not isinstance(hash_ids, list):
                raise ValueError("hash_ids: expected a list")
            blocks = -(-prompt_len // MOONCAKE_BLOCK)
            if len(hash_ids) != blocks:
                raise ValueError(
                    f"{len(hash_ids)} hash_ids for input_length={prompt_len}, expected {blocks}"
                )
            segments = tuple(
                Segment(key, min(MOONCAKE_BLOCK, prompt_len - i * MOONCAKE_BLOCK))
                for i, key in enumerate(hash_ids)
            )
            arrival_s = _whole(row, "timestamp", least=0) / 1000
            output_len = _whole(row, "output_length")
            requests.append(
                RequestSpec(f"r{len(requests)}", arrival_s, prompt_len, output_len, segments)
            )
        except ValueError as error:
            raise WorkloadFormatError(path, line, str(error)) from error
    return as_workload(Workload(tuple(requests), path.name.split(".")[0]))


# -- ShareGPT -------------------------------------------------------------------------------------


def read_sharegpt(
    path: str | Path,
    encode: Callable[[str], Sequence[int]],
    *,
    num_requests: int | None = None,
    output_len: int | None = None,
    multi_turn: bool = False,
    seed: int = 0,
) -> Workload:
    """Conversations, filtered as vLLM's benchmark does it.

    Kept are conversations of two turns or more, shuffled; turn 0 is the prompt and turn 1 the
    answer, whoever speaks. Dropped are prompts under 4 or over 1,024 tokens, answers under 4 (if
    ``output_len`` is not given), and sums over 2,048.

    With only the first two turns no prompt begins with another, so a prefix cache never hits;
    ``multi_turn`` makes a request of every second turn, with all turns before it in its prompt.
    Those come one after the other, as separate requests: nobody waits for an answer.

    Args:
        encode: text -> token ids, special tokens included.
        num_requests: how many; the file is used again from the front if it has fewer.
        output_len: answers of this many tokens, instead of as long as turn 1.
        seed: of the shuffle.

    Raises:
        WorkloadFormatError: not a list of conversations, or none that may be kept.
    """
    path = Path(path)
    conversations = _conversations(path)
    random.Random(seed).shuffle(conversations)
    requests: list[RequestSpec] = []
    for number, turns in enumerate(conversations):
        if num_requests is not None and len(requests) >= num_requests:
            break
        requests += _conversation_requests(number, turns, encode, output_len, multi_turn)
    if not requests:
        raise WorkloadFormatError(path, 1, "no conversation passes the filter")
    if num_requests is not None:
        again = islice(cycle(requests), num_requests)
        requests = [
            RequestSpec(f"r{i}", 0.0, r.prompt_len, r.output_len, r.segments)
            for i, r in enumerate(again)
        ]
    turns_used = "every second turn, with those before it" if multi_turn else "turns 0 and 1 only"
    return Workload(tuple(requests), path.stem, f"seed {seed}; {turns_used}")


def _conversations(path: Path) -> list[list[str]]:
    """The texts of each conversation of two turns or more."""
    try:
        with _open(path) as file:
            data = json.load(file)
    except json.JSONDecodeError as error:
        raise WorkloadFormatError(path, error.lineno, error.msg) from error
    if not isinstance(data, list):
        raise WorkloadFormatError(path, 1, "expected a list of conversations")
    found: list[list[str]] = []
    for number, entry in enumerate(data, 1):
        try:
            turns = [str(turn["value"]) for turn in entry.get("conversations", ())]
        except (AttributeError, KeyError, TypeError) as error:
            reason = f"conversation {number} has a turn without 'value'"
            raise WorkloadFormatError(path, 1, reason) from error
        if len(turns) >= 2:
            found.append(turns)
    return found


def _conversation_requests(
    number: int,
    turns: list[str],
    encode: Callable[[str], Sequence[int]],
    output_len: int | None,
    multi_turn: bool,
) -> Iterator[RequestSpec]:
    segments: list[Segment] = []
    for index in range(0, len(turns) - 1, 2):
        prompt, answer = (tuple(encode(text)) for text in turns[index : index + 2])
        segments.append(Segment(1000 * number + index, len(prompt), prompt))
        prompt_len = sum(segment.length for segment in segments)
        wanted = len(answer) if output_len is None else output_len
        too_short = prompt_len < 4 or (output_len is None and wanted < 4)
        if too_short or prompt_len > 1024 or prompt_len + wanted > 2048:
            return
        yield RequestSpec(f"c{number}.{index}", 0.0, prompt_len, wanted, tuple(segments))
        if not multi_turn:
            return
        segments.append(Segment(1000 * number + index + 1, len(answer), answer))


# -- reading lines --------------------------------------------------------------------------------


def _open(path: Path, mode: str = "rt") -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8")  # type: ignore[return-value]
    return open(path, mode, encoding="utf-8", newline="" if path.suffix == ".csv" else None)


def _csv_rows(path: Path, columns: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, fields) of each row, once the header has every one of ``columns``."""
    with _open(path) as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise WorkloadFormatError(path, 1, f"the header has no {', '.join(missing)}")
        for row in reader:
            if any(row[name] is None for name in columns):
                raise WorkloadFormatError(path, reader.line_num, "too few fields")
            yield reader.line_num, row


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise WorkloadFormatError(path, number, f"not JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise WorkloadFormatError(path, number, "expected an object")
            yield number, row


def _whole(row: dict[str, Any], name: str, least: int = 1) -> int:
    """A count from a file: digits in a CSV, a number in JSON.

    Raises:
        ValueError: naming the field.
    """
    value = row.get(name)
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}")
    return value
