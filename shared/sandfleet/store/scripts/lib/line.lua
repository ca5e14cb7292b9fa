-- The line of threads that wait for a place: zset `parked` digest -> score, whose whole part is the turn and whose
-- fraction is the order of arrival within it; hash `parked:{digest}`; zset `turns:{user}` digest -> turn.
local TURN_STEP = 1 / 1048576

-- Something that the line waits for has changed: publish the kept message, unless that was done a moment ago and nobody
-- has begun to serve since. A server too full for it must not undo what has happened: the line is looked at anyway.
local function kick(ms)
  if call('EXISTS', P .. 'parked') == 0 then return end
  local line = call('HMGET', P .. 'line', 'queue', 'message', 'kicked')
  if not line[1] or tonumber(line[3] or 0) > ms - 1000 then return end
  if type(redis.pcall('LPUSH', line[1], line[2])) == 'number' then
    redis.pcall('HSET', P .. 'line', 'kicked', ms)
  end
end

-- Whether anybody waits for this thread's sandbox.
local function awaited(digest, ms)
  return tonumber(call('HGET', P .. 'waiting:' .. digest, '@until') or 0) > ms
end

-- Take a thread out of the line; its turn, or nil if it did not stand there.
local function leave_line(digest)
  local score = call('ZSCORE', P .. 'parked', digest)
  if not score then return nil end
  local user = call('HGET', P .. 'parked:' .. digest, 'user')
  call('ZREM', P .. 'parked', digest)
  if user then call('ZREM', P .. 'turns:' .. user, digest) end
  call('DEL', P .. 'parked:' .. digest)
  return math.floor(tonumber(score))
end

-- A user's next turn: after the one reached, and after the last that the user has in the line.
local function next_turn(user)
  local turns = P .. 'turns:' .. user
  local reached = tonumber(call('HGET', P .. 'line', 'reached') or 0)
  while true do
    local last = call('ZREVRANGE', turns, 0, 0, 'WITHSCORES')
    if not last[1] then return reached + 1 end
    if call('ZSCORE', P .. 'parked', last[1]) then return math.max(reached, tonumber(last[2])) + 1 end
    call('ZREM', turns, last[1])
  end
end

-- Where a newcomer with that turn stands: behind all who have the same one.
local function last_of(turn)
  local last = call('ZREVRANGEBYSCORE', P .. 'parked', '(' .. (turn + 1), turn, 'WITHSCORES', 'LIMIT', 0, 1)
  return string.format('%.17g', last[2] and tonumber(last[2]) + TURN_STEP or turn)
end
