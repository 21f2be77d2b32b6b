"""The text that a draft learns from: what is on disk is not written again."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from outrider.distill.openings import Openings
from outrider.distill.shard import ScoredText, load_shard, save_shard
from outrider.distill.states import States
from outrider.distill.target import Target
from outrider.distill.writer import Writer, WriterOptions
from outrider.law.sparse import Int32Array
from outrider.lm.engine import ModelRefused

HELD_OUT = "held-out"
# Numbers of shards end far below.
_HELD_OUT_STREAM = 1 << 40
_SHARD_WAVES = 6


@dataclass(frozen=True)
class CorpusOptions:
    """What is written.

    Attributes:
        texts: to learn from; rounded up to whole shards.
        held_out: greedy answers that nothing is learned from.
        seed: of all draws.
        prompts: whole questions that half of the texts begin with; none leaves all questions to the target.
        writer: how.
    """

    texts: int = 8192
    held_out: int = 128
    seed: int = 0
    prompts: tuple[str, ...] = ()
    writer: WriterOptions = field(default_factory=WriterOptions)


# Called with the number of texts that there are now, and that there will be.
Progress = Callable[[int, int], None]


class Corpus:
    """Shards in a directory."""

    def __init__(self, directory: Path, options: CorpusOptions) -> None:
        self._directory, self._options = directory, options
        self._per_shard = min(options.texts, options.writer.slots * _SHARD_WAVES)
        self._names = [f"{index:05d}" for index in range(-(-options.texts // self._per_shard))]

    def write(self, target: Target, threads: int, progress: Progress) -> None:
        """Writes the shards that are missing, `threads` at a time.

        Raises ModelRefused when the directory holds text for another target or other options.
        """
        self._claim(target)
        counted = _Counter(progress, len(self._names) * self._per_shard + self._options.held_out)
        openings = Openings(target.vocabulary.tokenizer, target.vocabulary.size, self._options.prompts)

        def one(name: str) -> None:
            held_out = name == HELD_OUT
            count = self._options.held_out if held_out else self._per_shard
            if (self._directory / name).is_dir():
                return counted.add(count)
            options = replace(self._options.writer, temperatures=(0.0,)) if held_out else self._options.writer
            rng = np.random.default_rng([self._options.seed, _HELD_OUT_STREAM if held_out else int(name)])
            writer = Writer(target, options)
            return save_shard(
                self._directory / name, writer.write(openings.draw(count, rng, held_out=held_out), rng, counted.add)
            )

        torch.set_num_threads(1)  # each writer has its own
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, [HELD_OUT, *self._names]))

    def texts(self, states: States | None = None) -> list[ScoredText]:
        """What is learned from; with the target's states where these are asked for."""
        return [text for name in self._names for text in self._load(name, states)]

    def held_out(self, states: States | None = None) -> list[ScoredText]:
        """What is measured with."""
        return self._load(HELD_OUT, states)

    def _load(self, name: str, states: States | None) -> list[ScoredText]:
        texts = load_shard(self._directory / name)
        return texts if states is None else states.of(name, texts)

    def _claim(self, target: Target) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        settings = asdict(self._options) | {"target": target.source.name, "vocabulary": target.vocabulary.fingerprint}
        settings["texts"] = self._per_shard  # whole shards can be added
        ours, path = json.dumps(settings, indent=2), self._directory / "corpus.json"
        if not path.exists():
            path.write_text(ours)
        elif path.read_text() != ours:
            raise ModelRefused(
                f"{self._directory} holds text of another target or with other settings; remove it first"
            )


class _Counter:
    """Adds up what several threads report."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._lock, self._done = Lock(), 0

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress(self._done, self._total)


def most_frequent(texts: Sequence[ScoredText], vocab_size: int, count: int) -> Int32Array:
    """The `count` tokens that the target would say most often in these texts, [count] int32 ascending.

    A law counts with its likeliest token, and for a tenth with the next four.
    """
    counts = np.zeros(vocab_size)
    for text in texts:
        np.add.at(counts, text.ids[:, 0], 1.0)
        np.add.at(counts, text.ids[:, 1:5], 0.1)
    return np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int32)
