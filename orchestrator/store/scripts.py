"""The Lua scripts of the Redis store: each is one atomic step and one round trip.

Keys of every script, both in the hash slot of the session's id:
    KEYS[1]  state   hash: epoch, prompt_length, finish_reason ("0" while running), meta, progress, nonce, and
                     cancelled once asked for
    KEYS[2]  tokens  string: int32 little-endian, the prompt and all committed tokens; its length is the session's

Both keys get the same time-to-live in the same step, so that they vanish together. Every script answers a list that
starts with a verdict; "ok" means that the store now is as asked for. Numbers stay below 2^53, where Lua's are exact.
"""

# ARGV: nonce, epoch, prompt_length, meta, progress, finish_reason, tokens, ttl_ms.
# Answers ok | exists. A repeated create is known by its nonce.
CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then
  if redis.call('HGET', KEYS[1], 'nonce') == ARGV[1] then return {'ok'} end
  return {'exists'}
end
redis.call('HSET', KEYS[1], 'nonce', ARGV[1], 'epoch', ARGV[2], 'prompt_length', ARGV[3], 'meta', ARGV[4],
           'progress', ARGV[5], 'finish_reason', ARGV[6])
redis.call('SET', KEYS[2], ARGV[7], 'PX', ARGV[8])
redis.call('PEXPIRE', KEYS[1], ARGV[8])
return {'ok'}
"""

# What commit and finish check first. Answers gone | corrupt | stale epoch | ahead epoch, the epoch being the store's.
_FENCE = """
local held = redis.call('HMGET', KEYS[1], 'epoch', 'finish_reason', 'cancelled')
if not held[1] then return {'gone'} end
local epoch, finished = tonumber(held[1]), held[2]
if not (epoch and finished) then return {'corrupt'} end
if tonumber(ARGV[1]) < epoch then return {'stale', held[1]} end
if tonumber(ARGV[1]) > epoch then return {'ahead', held[1]} end
"""

# ARGV: epoch, base_length, tokens, progress, finish_reason, ttl_ms.
# Answers, beside the fence's: ok | cancelled | finished reason | length tokens.
# The repeated commit is looked for before the flags: what is committed stays so whatever came later.
COMMIT = (
    _FENCE
    + """
local base = 4 * tonumber(ARGV[2])
local length = redis.call('STRLEN', KEYS[2])
if length >= base + #ARGV[3] and (ARGV[5] == '0' or ARGV[5] == finished)
   and redis.call('GETRANGE', KEYS[2], base, base + #ARGV[3] - 1) == ARGV[3] then return {'ok'} end
if held[3] then return {'cancelled'} end
if finished ~= '0' then return {'finished', finished} end
if length ~= base then return {'length', tostring(length / 4)} end
redis.call('APPEND', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], 'progress', ARGV[4], 'finish_reason', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
return {'ok'}
"""
)

# ARGV: epoch, finish_reason.
# Answers, beside the fence's: ok | finished reason.
FINISH = (
    _FENCE
    + """
if finished ~= '0' and finished ~= ARGV[2] then return {'finished', finished} end
redis.call('HSET', KEYS[1], 'finish_reason', ARGV[2])
return {'ok'}
"""
)

# Answers ok, the hash as a flat list, the tokens, the remaining time in ms | gone.
_SNAPSHOT = """
return {'ok', redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2]), redis.call('PTTL', KEYS[1])}
"""

LOAD = "if redis.call('EXISTS', KEYS[1]) == 0 then return {'gone'} end" + _SNAPSHOT

TAKE_OVER = (
    """
if redis.call('EXISTS', KEYS[1]) == 0 then return {'gone'} end
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
"""
    + _SNAPSHOT
)

# ARGV: finish_reason.
# Answers ok | gone.
REQUEST_CANCEL = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {'gone'} end
redis.call('HSET', KEYS[1], 'cancelled', '1')
if redis.call('HGET', KEYS[1], 'finish_reason') == '0' then redis.call('HSET', KEYS[1], 'finish_reason', ARGV[1]) end
return {'ok'}
"""
