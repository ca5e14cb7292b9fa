-- The one-call acquire: hold a live sandbox, or park the waiter and ask the scheduler. Hot path.
-- KEYS  1 prefix
-- ARGV  1 digest  2 op id  3 reply_to  4 agent  5 agent ttl ms  6 wait ms  7 queue or ''  8 message
-- Returns {status, route, was warm 0|1}, {'backing_off', retry after ms, error}; status also "crowded" (nothing done).
--@use time route story reply line waiters sandbox
local ms = now_ms()
local state, sid, route, node = thread_state(A[1], ms)
if state == 'live' then
  local agents, ttl = P .. 'agents:' .. sid, tonumber(A[5])
  call('ZADD', agents, ms + ttl, A[4])
  keep(agents, math.max(ttl, 2 * DAY))
  local was_warm = call('ZREM', P .. 'warm:' .. node, sid)
  call('HSET', P .. 'sandbox:' .. sid, 'used', ms)
  call('PEXPIRE', P .. 'sandbox:' .. sid, KEEP)
  call('PEXPIRE', P .. 'thread:' .. A[1], KEEP)
  call('PEXPIRE', P .. 'id:' .. sid, KEEP)
  return { 'live', route, was_warm }
end

-- Creations that keep failing are spread out; until the next may be tried nobody waits for it.
if state == nil then
  local failing = call('HMGET', P .. 'failing:' .. A[1], 'retry_at', 'error')
  local left = tonumber(failing[1] or 0) - ms
  if left > 0 then return { 'backing_off', left, failing[2] } end
end

-- Counted exactly while they are few; a crowd is not read through on every call.
local waiting = P .. 'waiting:' .. A[1]
local marks = call('HMGET', waiting, '@req', '@until')
local requested_at = marks[1]
local others = call('HLEN', waiting)
if others <= FEW or others >= MAX_WAITERS then
  others = 0
  for _, w in ipairs(read_waiters(A[1], ms, others > FEW)) do
    if w.op ~= A[2] then others = others + 1 end
  end
end
if others >= MAX_WAITERS then return { 'crowded' } end
local until_ms = ms + tonumber(A[6])
call('HSET', waiting, A[2], until_ms .. '|' .. A[5] .. '|' .. A[3] .. '|' .. A[4],
  '@until', math.max(until_ms, tonumber(marks[2] or 0)))
local status = 'creating'
if state == nil and call('ZSCORE', P .. 'parked', A[1]) then
  status = 'parked'
  for _, key in ipairs({ P .. 'parked', P .. 'parked:' .. A[1] }) do keep(key, tonumber(A[6]) + 2 * DAY) end
elseif state == nil then
  status = 'requested'
  local fresh = others > 0 and requested_at and tonumber(requested_at) > ms - 2000
  if A[7] ~= '' and not fresh then
    call('HSET', waiting, '@req', ms)
    call('LPUSH', A[7], A[8])
  end
end
-- Kept for the moment a stopping sandbox is out of the way.
if A[7] ~= '' then call('HSET', waiting, '@queue', A[7], '@message', A[8]) end
keep(waiting, math.max(tonumber(A[6]), 1))
return { status }
