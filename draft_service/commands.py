"""The commands of a draft stream: from messages to what the engine thread takes."""

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from draft_service.config import PROPOSER_NAMES
from outrider.law.noise import Purpose
from outrider.law.params import LawParams, ParamError, check, from_law_spec
from outrider.law.sparse import Int32Array
from outrider.net.arrays import ArrayError, features_from_message, tokens_in_vocab
from outrider.net.bounds import (
    DEFAULT_LAW_TOP,
    MAX_FEATURE_BYTES,
    MAX_LAW_TOP,
    MAX_LOOKAHEAD,
    MAX_SESSION_ID,
    MAX_TENANT,
)
from outrider.net.errors import invalid_field
from outrider.observe.tracing import kept
from outrider.v1 import draft_pb2
from outrider.v1.draft_pb2 import Proposer

MAX_PREDICTION = 65_536

_NOTHING = np.empty(0, np.int32)

# (number of the stream in this process, session id): sessions of different streams never meet.
Key = tuple[int, str]
# (who the stream's certificate says the orchestrator is, whom it says that the session is for).
Tenant = tuple[str, str]


@dataclass(frozen=True)
class Peer:
    """The other end of a stream.

    Attributes:
        stream: its number in this process.
        identity: names in its client certificate; empty without one.
    """

    stream: int
    identity: str = ""


@dataclass(frozen=True)
class SessionLaw:
    """What stays the same for all blocks of a session.

    Attributes:
        kind: what makes the blocks.
        seed: of the session's noise.
        top: most entries that a row of the draft law keeps.
        coupled: whether tokens are drawn with COUPLE noise, which the target shares.
        omit_law: whether blocks travel without their law.
        prediction: [n] int32, what the client expects to be generated.
        tenant: whom the session is for.
    """

    kind: Proposer.ValueType
    params: LawParams
    seed: int
    top: int
    coupled: bool = False
    omit_law: bool = False
    prediction: Int32Array = field(default_factory=lambda: _NOTHING, compare=False)
    tenant: Tenant = ("", "")

    @property
    def by_token(self) -> bool:
        """Whether the target's own tokens decide, whatever is proposed: the output is a function of the seed."""
        return self.coupled or self.params.greedy

    @property
    def purpose(self) -> Purpose:
        """Of the noise that tokens are drawn with."""
        return Purpose.COUPLE if self.coupled else Purpose.PROPOSE


@dataclass(frozen=True)
class Ask:
    """An Open (`law` is set) or an Advance: the next block of a session.

    Attributes:
        tokens: the last committed tokens, ending at base_length; all of them in an Open.
        prefix_hash: of those before `tokens`; 0 in an Open.
        held: whether the sender has the block already: it was pushed to it.
        nodes: most tokens of the block where it may be a tree; 0 for a chain.
        features: (position of the first, [n, width] bfloat16) of the target's that came along; None without any.
        traceparent: of the round that the block is for; empty where that is not traced.
    """

    key: Key
    epoch: int
    base_length: int
    tokens: Int32Array
    prefix_hash: int
    lookahead: int
    law: SessionLaw | None
    held: bool = False
    traceparent: str = ""
    nodes: int = 0
    features: tuple[int, torch.Tensor] | None = None
    arrived_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class CloseSession:
    """Frees a session; not answered.

    Attributes:
        ended: whether its output may be kept: then the rest says what was committed since the last command, as in Ask.
    """

    key: Key
    epoch: int
    ended: bool = False
    base_length: int = 0
    tokens: Int32Array = field(default_factory=lambda: _NOTHING)
    prefix_hash: int = 0


@dataclass(frozen=True)
class CloseStream:
    """Frees all sessions of a stream and forgets what is queued for them."""

    stream: int


Command = Ask | CloseSession | CloseStream


def base_length_of(message: draft_pb2.DraftCommand) -> int:
    """The base length that answers to a command carry, also when it is invalid otherwise."""
    if message.WhichOneof("action") == "open":
        return len(message.open.tokens) // 4
    return message.advance.base_length


def parse_command(
    message: draft_pb2.DraftCommand,
    peer: Peer,
    vocab_size: int,
    kinds: tuple[Proposer.ValueType, ...],
    feature_width: int = 0,
) -> Ask | CloseSession:
    """Checks a command. `feature_width`: elements of a token's features; 0 where nothing here is fed with any.

    Raises OutriderError INVALID_FIELD naming the field and its limit.
    """
    if not 1 <= len(message.session_id) <= MAX_SESSION_ID:
        raise invalid_field(f"session_id has {len(message.session_id)} characters, must be 1 to {MAX_SESSION_ID}")
    key = (peer.stream, message.session_id)
    try:
        match message.WhichOneof("action"):
            case "open":
                ask = _open(message.open, key, message.epoch, vocab_size, kinds, peer)
                ask = _with_features(ask, message.open, feature_width)
            case "advance":
                ask = _advance(message.advance, key, message.epoch, vocab_size)
                ask = _with_features(ask, message.advance, feature_width)
            case "close":
                return _close(message.close, key, message.epoch, vocab_size)
            case _:
                raise invalid_field("action is not set")
    except (ArrayError, ParamError) as error:
        raise invalid_field(str(error)) from error
    return replace(ask, traceparent=kept(message.traceparent)) if message.traceparent else ask


def _open(
    message: draft_pb2.Open,
    key: Key,
    epoch: int,
    vocab_size: int,
    kinds: tuple[Proposer.ValueType, ...],
    peer: Peer,
) -> Ask:
    tokens = tokens_in_vocab(message.tokens, "open.tokens", vocab_size)
    if not len(tokens):
        raise invalid_field("open.tokens holds 0 tokens, must be at least 1")
    if message.law_top > MAX_LAW_TOP:
        raise invalid_field(f"open.law_top is {message.law_top}, limit {MAX_LAW_TOP}")
    kind = message.proposer or kinds[0]
    if kind not in kinds:
        offered = ", ".join(PROPOSER_NAMES[one] for one in kinds)
        raise invalid_field(f"open.proposer is {PROPOSER_NAMES.get(kind, kind)}, this worker offers {offered}")
    prediction = tokens_in_vocab(message.prediction, "open.prediction", vocab_size)
    if len(prediction) > MAX_PREDICTION:
        raise invalid_field(f"open.prediction holds {len(prediction)} tokens, limit {MAX_PREDICTION}")
    if len(message.tenant) > MAX_TENANT:
        raise invalid_field(f"open.tenant has {len(message.tenant)} characters, limit {MAX_TENANT}")
    params, seed = from_law_spec(message.law)
    check(params, vocab_size)
    law = SessionLaw(
        kind,
        params,
        seed,
        message.law_top or DEFAULT_LAW_TOP,
        coupled=message.coupled,
        omit_law=message.omit_law,
        prediction=prediction,
        tenant=(peer.identity, message.tenant),
    )
    lookahead, nodes = _lookahead(message.lookahead, "open"), _nodes(message.max_nodes, "open")
    return Ask(key, epoch, len(tokens), tokens, 0, lookahead, law, nodes=nodes)


def _advance(message: draft_pb2.Advance, key: Key, epoch: int, vocab_size: int) -> Ask:
    tokens = tokens_in_vocab(message.tokens, "advance.tokens", vocab_size)
    if not 1 <= len(tokens) <= message.base_length:
        limit = f"1 to base_length {message.base_length}"
        raise invalid_field(f"advance.tokens holds {len(tokens)} tokens, must be {limit}")
    lookahead, nodes = _lookahead(message.lookahead, "advance"), _nodes(message.max_nodes, "advance")
    return Ask(key, epoch, message.base_length, tokens, message.prefix_hash, lookahead, None, message.held, nodes=nodes)


def _with_features(ask: Ask, message: draft_pb2.Open | draft_pb2.Advance, width: int) -> Ask:
    if not message.HasField("features"):
        return ask
    if not width:
        raise invalid_field("features is set, and no proposer of this worker is fed with any")
    if len(message.features.states) > MAX_FEATURE_BYTES:
        raise invalid_field(f"features.states has {len(message.features.states)} bytes, limit {MAX_FEATURE_BYTES}")
    states, start = features_from_message(message.features, width), message.features.start
    if start + len(states) >= ask.base_length:
        last = start + len(states) - 1
        raise invalid_field(f"features end with position {last}, must be before base_length {ask.base_length} - 1")
    return replace(ask, features=(start, states))


def _nodes(value: int, action: str) -> int:
    if value > MAX_LOOKAHEAD:
        raise invalid_field(f"{action}.max_nodes is {value}, limit {MAX_LOOKAHEAD}")
    return value


def _close(message: draft_pb2.Close, key: Key, epoch: int, vocab_size: int) -> CloseSession:
    tokens = tokens_in_vocab(message.tokens, "close.tokens", vocab_size)
    if len(tokens) > message.base_length:
        limit = f"at most base_length {message.base_length}"
        raise invalid_field(f"close.tokens holds {len(tokens)} tokens, must be {limit}")
    return CloseSession(key, epoch, message.ended, message.base_length, tokens, message.prefix_hash)


def _lookahead(value: int, action: str) -> int:
    if value > MAX_LOOKAHEAD:
        raise invalid_field(f"{action}.lookahead is {value}, limit {MAX_LOOKAHEAD}")
    return value
