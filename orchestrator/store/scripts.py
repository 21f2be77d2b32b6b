"""The Lua scripts of the Redis store: each is one atomic step and one round trip.

Keys of every script, both in the hash slot of the session's id, so that a cluster can run it:
    KEYS[1]  state   hash: version, epoch, prompt_length, finish_reason ("0" while running), meta, progress, nonce, and
                     cancelled once asked for
    KEYS[2]  tokens  string: int32 little-endian, the prompt and all committed tokens; its length is the session's

Both keys get the same time-to-live in the same step, so that they vanish together. Every script answers a list that
starts with a verdict; "ok" means that the store now is as asked for. Every script is safe to repeat, and "ok" always
comes with a write, also of what is so already: a WAIT behind the script then waits for what it answers.
Numbers stay below 2^53, where Lua's are exact.
"""

import hashlib
from dataclasses import dataclass, field

from outrider.versions import RECORD_VERSION as VERSION


@dataclass(frozen=True)
class Script:
    """A script and the name by which a server that has seen it knows it."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


# ARGV: nonce, epoch, prompt_length, meta, progress, finish_reason, tokens, ttl_ms.
# Answers ok | exists. A repeated create is known by its nonce.
CREATE = Script(f"""
if redis.call('EXISTS', KEYS[1]) == 1 then
  if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {{'exists'}} end
  redis.call('PEXPIRE', KEYS[2], ARGV[8])
else
  redis.call('HSET', KEYS[1], 'version', '{VERSION}', 'nonce', ARGV[1], 'epoch', ARGV[2], 'prompt_length', ARGV[3],
             'meta', ARGV[4], 'progress', ARGV[5], 'finish_reason', ARGV[6])
  redis.call('SET', KEYS[2], ARGV[7], 'PX', ARGV[8])
end
redis.call('PEXPIRE', KEYS[1], ARGV[8])
return {{'ok'}}
""")

# What every other script checks first. Answers gone | version of the record | corrupt.
_HELD = f"""
local held = redis.call('HMGET', KEYS[1], 'version', 'epoch', 'finish_reason', 'cancelled')
if not (held[1] or held[2]) then return {{'gone'}} end
if held[1] and held[1] ~= '{VERSION}' then return {{'version', held[1]}} end
local epoch, finished = tonumber(held[2]), held[3]
if not (held[1] and epoch and finished) then return {{'corrupt'}} end
"""

# What commit and finish check then. Answers stale epoch | ahead epoch, the epoch being the store's.
_FENCE = (
    _HELD
    + """
if tonumber(ARGV[1]) < epoch then return {'stale', held[2]} end
if tonumber(ARGV[1]) > epoch then return {'ahead', held[2]} end
"""
)

# ARGV: epoch, base_length, tokens, progress, finish_reason, ttl_ms.
# Answers, beside the fence's: ok | cancelled | finished reason | length tokens.
# The repeated commit is looked for before the flags: what is committed stays so whatever came later.
COMMIT = Script(
    _FENCE
    + """
local base = 4 * tonumber(ARGV[2])
local length = redis.call('STRLEN', KEYS[2])
local known = length >= base + #ARGV[3] and (ARGV[5] == '0' or ARGV[5] == finished)
              and redis.call('GETRANGE', KEYS[2], base, base + #ARGV[3] - 1) == ARGV[3]
if not known then
  if held[4] then return {'cancelled'} end
  if finished ~= '0' then return {'finished', finished} end
  if length ~= base then return {'length', tostring(length / 4)} end
  redis.call('APPEND', KEYS[2], ARGV[3])
  redis.call('HSET', KEYS[1], 'progress', ARGV[4], 'finish_reason', ARGV[5])
end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
return {'ok'}
"""
)

# ARGV: epoch, finish_reason.
# Answers, beside the fence's: ok | finished reason.
FINISH = Script(
    _FENCE
    + """
if finished ~= '0' and finished ~= ARGV[2] then return {'finished', finished} end
redis.call('HSET', KEYS[1], 'finish_reason', ARGV[2])
return {'ok'}
"""
)

# ARGV: what to add to the epoch: 1 takes the session over, 0 only reads it.
# Answers ok, the hash as a flat list, the tokens, the remaining time in ms.
LOAD = Script(
    _HELD
    + """
redis.call('HINCRBY', KEYS[1], 'epoch', ARGV[1])
return {'ok', redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2]), redis.call('PTTL', KEYS[1])}
"""
)

# ARGV: finish_reason.
# Answers ok.
REQUEST_CANCEL = Script(
    _HELD
    + """
redis.call('HSET', KEYS[1], 'cancelled', '1')
if finished == '0' then redis.call('HSET', KEYS[1], 'finish_reason', ARGV[1]) end
return {'ok'}
"""
)
