"""`bench data-loading`: times batches from token files in the page cache, in one thread.

All contestants return int64 inputs and labels of the same windows of 4,096 tokens, in the same
order. The peers are torch's DataLoader on memory-mapped files, and on Megatron's indexed data set
if it can be imported. Only parallel3d computes the order while timed, and validates token IDs,
which are random.
"""

from __future__ import annotations

import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from parallel3d.data.loader import BatchLoader
from parallel3d.data.order import window_order
from parallel3d.data.token_files import FolderWriter, open_tokens
from parallel3d.data.windows import ShuffledWindows, TokenIds
from parallel3d.tools.bench.harness import check_agreement
from parallel3d.tools.bench.report import Options, ResultRow, announced, chosen, row_of

SEQ_LEN = 4096
BATCH = 32
VOCAB = 50_000
SHARDS = 4
SHARD_TOKENS = 1 << 23
STEPS = 40
ROUNDS = 7
PEERS = ("torch DataLoader", "Megatron indexed data set")
_UNIT = "cpu_s_per_Mtoken"
_BAR = 1 / 50
Batches = Iterator[tuple[Tensor, Tensor]]
Read = Callable[[int, int, int], TokenIds]  # (shard, offset, length) -> token IDs


class ShardWindows(Dataset[tuple[Tensor, Tensor]]):
    """Data set of windows. An index is an offset into the concatenated shards."""

    def __init__(self, read: Read) -> None:
        self.read = read

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        shard, place = divmod(start, SHARD_TOKENS)
        ids = self.read(shard, place, min(SEQ_LEN + 1, SHARD_TOKENS - place))
        if len(ids) <= SEQ_LEN:
            ids = np.append(ids, self.read(shard + 1, 0, SEQ_LEN + 1 - len(ids)))
        whole = torch.from_numpy(ids.astype(np.int64))
        return whole[:-1], whole[1:]


def bench_data_loading(options: Options) -> list[ResultRow]:
    """Returns a row for each available peer, and one against 50 million tokens/s."""
    torch.set_num_threads(1)
    steps = options.steps or STEPS
    rounds = options.rounds or ROUNDS
    rows = list[ResultRow]()
    own = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_shards(root)
        for name in announced(chosen(PEERS, options)):
            read = _mapped(root) if name == PEERS[0] else _indexed(root)
            if read is None:
                print("  skipped: megatron-core is not installed", file=sys.stderr, flush=True)
                continue
            batches = ours(root), peer(read, root, (rounds * steps + 1) * BATCH)
            (inputs, labels), (peers_inputs, peers_labels) = (next(each) for each in batches)
            check_agreement(
                [("inputs", inputs, peers_inputs), ("labels", labels, peers_labels)], tolerance=0.0
            )
            pairs = [
                (seconds(batches[0], steps), seconds(batches[1], steps)) for _ in range(rounds)
            ]
            rows.append(row_of(name, _UNIT, pairs))
            own += [seconds_of_ours for seconds_of_ours, _ in pairs]
    return [
        *rows,
        *(
            [row_of("50 million tokens/s", _UNIT, [(each, _BAR) for each in own], bar=1.0)]
            if own
            else []
        ),
    ]


def write_shards(root: Path) -> None:
    """Writes the same documents, one per shard, in parallel3d's and in Megatron's format."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, VOCAB, SHARD_TOKENS, dtype=np.uint16) for _ in range(SHARDS)]
    with FolderWriter(
        root / "tokens", vocab_size=VOCAB + 1, end_of_text=VOCAB, shard_tokens=SHARD_TOKENS
    ) as folder:
        for ids in documents:
            ids[-1] = VOCAB
            folder.add("train", ids)
    write_megatron(root / "megatron", documents)


def write_megatron(prefix: Path, documents: Sequence[NDArray[np.uint16]]) -> None:
    """Writes PREFIX.bin and PREFIX.idx like Megatron's builder. Each document is one sequence."""
    lengths = np.array([len(ids) for ids in documents])
    places = 2 * (np.cumsum(lengths) - lengths)
    uint16, count = 8, len(documents)  # 8 is Megatron's dtype code
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, uint16, count, count + 1)
    tables = lengths.astype("<i4"), places.astype("<i8"), np.arange(count + 1, dtype="<i8")
    index = header + b"".join(table.tobytes() for table in tables)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    content = b"".join(ids.astype("<u2").tobytes() for ids in documents)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(content)


def ours(root: Path) -> Batches:
    """Yields the batches of `BatchLoader`."""
    windows = ShuffledWindows(open_tokens(root / "tokens", 0.05).train, seq_len=SEQ_LEN, seed=0)
    loader = BatchLoader(
        windows,
        global_batch_size=BATCH,
        microbatch_size=BATCH,
        dp_rank=0,
        dp_size=1,
        vocab=VOCAB + 1,
    )
    step = 0
    while True:
        batch = loader.batch(step)
        yield batch.inputs[0], batch.labels[0]
        step += 1


def peer(read: Read, root: Path, samples: int) -> Batches:
    """Yields the batches of torch's DataLoader in this process, in the same order."""
    windows = (SHARDS * SHARD_TOKENS - 1) // SEQ_LEN
    starts = window_order(np.arange(samples), windows=windows, seed=0) * SEQ_LEN
    return iter(DataLoader(ShardWindows(read), batch_size=BATCH, sampler=starts.tolist()))


def _mapped(root: Path) -> Read:
    shards = [
        np.memmap(path, dtype="<u2", mode="r")
        for path in sorted((root / "tokens").glob("train-0000?.bin"))
    ]
    return lambda shard, place, length: shards[shard][place : place + length]


def _indexed(root: Path) -> Read | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            megatron: Any = import_module("megatron.core.datasets.indexed_dataset")
    except ImportError:
        return None
    read: Read = megatron.IndexedDataset(str(root / "megatron")).get
    return read


def seconds(batches: Batches, steps: int) -> float:
    """Returns the CPU seconds per million tokens, over `steps` batches."""
    start = time.process_time()
    for _ in range(steps):
        next(batches)
    return (time.process_time() - start) * 1e6 / (steps * BATCH * SEQ_LEN)
