"""The synthetic model: a deterministic law without weights, for tests and for load without a model."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.law.sparse import Float32Array, Int32Array
from outrider.lm.engine import EngineInfo, Segment
from outrider.lm.source import ModelSource, SourceKind
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.token_sequence import TokenSequence, token_sequence
from outrider.lm.tokenizer import synthetic_tokenizer, vocabulary_of

# Rows of the output head beyond the real vocabulary score this much: a missing cut shows at once.
PADDING_LOGIT = 10.0

# Floats that the row cache holds at most (64 MB).
_CACHE_FLOATS = 1 << 24

_Words = npt.NDArray[np.uint64]


class SyntheticEngine:
    """An Engine whose logits are a hash-seeded normal draw per (seed, last `order` tokens).

    A pass takes `pass_ms` plus `item_us` for each segment and `position_us` for each position, slept with the GIL
    released, as a device would.
    """

    @staticmethod
    def of(source: ModelSource) -> "SyntheticEngine | None":
        """None where the source is a model of weights. Raises ModelRefused."""
        if source.kind is not SourceKind.SYNTHETIC:
            return None
        return SyntheticEngine(SyntheticSpec.parse(source.location), source.name)

    def __init__(self, spec: SyntheticSpec, model_id: str = "synthetic:") -> None:
        time.sleep(spec.load_ms / 1e3)
        self._spec = spec
        self._rows = _RowCache(spec)
        vocabulary = vocabulary_of(synthetic_tokenizer(spec))
        self._info = EngineInfo(
            model_id=model_id,
            vocab_size=spec.vocab_size,
            padded_vocab_size=max(spec.vocab_size, spec.padded_vocab_size),
            context_length=spec.context_length,
            dtype="float32",
            eos_token_ids=(spec.eos,) if spec.eos >= 0 else (),
            vocab_fingerprint=vocabulary.fingerprint,
            token_hashes=vocabulary.token_hashes,
            tokenizer=vocabulary.tokenizer,
        )

    @property
    def info(self) -> EngineInfo:
        """What is served."""
        return self._info

    def open(self, tokens: Int32Array) -> TokenSequence:
        """An empty sequence: there is no prefix sharing."""
        return TokenSequence()

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """As in Engine.forward: one [rows, vocab_size] float32 tensor per segment."""
        windows = [self._append(segment) for segment in segments]
        logits = self._rows.lookup(np.concatenate(windows))[:, : self._spec.vocab_size]
        if self._spec.agree < 1.0:
            wrong = np.concatenate([self._disagrees(*pair) for pair in zip(segments, windows, strict=True)])
            logits[wrong] = np.roll(logits[wrong], 1, axis=1)
        self._sleep(segments)
        cut = torch.from_numpy(logits)
        return list(torch.split(cut, [segment.rows for segment in segments]))

    def pages(self) -> tuple[int, int]:
        """(0, 0): no KV cache."""
        return 0, 0

    def shared_pages(self) -> int:
        """0: no KV cache."""
        return 0

    def _sleep(self, segments: Sequence[Segment]) -> None:
        spec, positions = self._spec, sum(len(segment.tokens) for segment in segments)
        seconds = spec.pass_ms / 1e3 + (len(segments) * spec.item_us + positions * spec.position_us) / 1e6
        if seconds:
            time.sleep(seconds)

    def _disagrees(self, segment: Segment, windows: Int32Array) -> npt.NDArray[np.bool_]:
        """[rows] whether each row, after the last tokens [rows, order], is another than the model's."""
        tokens = token_sequence(segment.sequence).tokens
        ends = np.arange(len(tokens) - segment.rows, len(tokens), dtype=np.int32)
        branches = token_sequence(segment.sequence).branches
        if branches is not None:
            ends = branches.positions_of(ends.astype(np.int64)).astype(np.int32)
        places = np.column_stack([np.full(segment.rows, tokens[0], np.int32), ends, windows])
        return _uniforms(_hash(places, self._spec.noise_seed)) >= self._spec.agree

    def _append(self, segment: Segment) -> Int32Array:
        """Appends a segment; returns the contexts of its wanted positions, [rows, order] int32, -1 before the start."""
        sequence = token_sequence(segment.sequence)
        sequence.append(segment.tokens, segment.parents)
        order = self._spec.order
        if not order or not segment.rows:
            return np.empty((segment.rows, order), np.int32)
        if sequence.branches is not None:
            texts = [sequence.text_before(place, order) for place in range(sequence.length)[-segment.rows :]]
            return np.array([[-1] * (order - len(text)) + text for text in texts], np.int32)
        tail = sequence.tokens[-(segment.rows + order - 1) :]
        padded = np.pad(tail, (segment.rows + order - 1 - len(tail), 0), constant_values=-1)
        return np.lib.stride_tricks.sliding_window_view(padded, order)


class _RowCache:
    """Rows by their context, computed once; bounded."""

    def __init__(self, spec: SyntheticSpec) -> None:
        self._spec = spec
        self._padded = max(spec.vocab_size, spec.padded_vocab_size)
        self._limit = max(1, _CACHE_FLOATS // self._padded)
        self._rows: dict[bytes, Float32Array] = {}

    def lookup(self, windows: Int32Array) -> Float32Array:
        """[rows, order] contexts -> [rows, padded_vocab_size] float32 logits."""
        keys = [window.tobytes() for window in windows]
        missing = {key: index for index, key in enumerate(keys) if key not in self._rows}
        if missing:
            if len(self._rows) + len(missing) > self._limit:
                self._rows.clear()
                missing = {key: index for index, key in enumerate(keys)}
            self._rows.update(zip(missing, self._compute(windows[list(missing.values())]), strict=True))
        out = np.empty((len(keys), self._padded), np.float32)
        for index, key in enumerate(keys):
            out[index] = self._rows[key]
        return out

    def _compute(self, windows: Int32Array) -> Float32Array:
        spec = self._spec
        logits = spec.scale * _normals(_hash(windows, spec.seed), spec.vocab_size)
        if spec.noise:
            # Another domain, so that noise_seed == seed is no multiple of the model itself.
            logits += spec.noise * _normals(_hash(windows, ~spec.noise_seed), spec.vocab_size)
        rows = np.full((len(windows), self._padded), PADDING_LOGIT, np.float32)
        rows[:, : spec.vocab_size] = logits
        return rows


def _mix(words: _Words) -> _Words:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _hash(windows: Int32Array, seed: int) -> _Words:
    """[rows, order] -> [rows] 64-bit hashes."""
    state = _mix(np.full(len(windows), seed & 0xFFFFFFFFFFFFFFFF, np.uint64))
    for column in windows.T:
        state = _mix(state ^ (column.astype(np.int64) + 1).astype(np.uint64))
    return state


def _normals(hashes: _Words, columns: int) -> npt.NDArray[np.float64]:
    """[rows, columns] standard normals: Box-Muller over hashed uniforms, the same on every platform and version."""
    counters = np.arange(columns, dtype=np.uint64)
    radius = _uniforms(_mix(hashes[:, None] ^ _mix(counters * np.uint64(2))))
    angle = _uniforms(_mix(hashes[:, None] ^ _mix(counters * np.uint64(2) + np.uint64(1))))
    normals: npt.NDArray[np.float64] = np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
    return normals


def _uniforms(words: _Words) -> npt.NDArray[np.float64]:
    """The upper 53 bits as numbers in (0, 1)."""
    uniforms: npt.NDArray[np.float64] = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return uniforms
