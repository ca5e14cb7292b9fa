-- The one-call acquire: hold a live sandbox, or park the waiter and ask the scheduler. Hot path.
-- KEYS  1 prefix
-- ARGV  1 digest  2 op id  3 reply_to  4 agent  5 agent ttl ms  6 wait ms  7 queue or ''  8 message
-- Returns {status, route, was warm 0|1}; status also "crowded" (nothing done).
--@use time route story reply waiters sandbox
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

-- Counted exactly while they are few; a crowd is not read through on every call.
local waiting = P .. 'waiting:' .. A[1]
local requested_at = call('HGET', waiting, '@req')
local others = call('HLEN', waiting)
if others <= FEW or others >= MAX_WAITERS then
  others = 0
  for _, w in ipairs(read_waiters(A[1], ms, others > FEW)) do
    if w.op ~= A[2] then others = others + 1 end
  end
end
if others >= MAX_WAITERS then return { 'crowded' } end
call('HSET', waiting, A[2], (ms + tonumber(A[6])) .. '|' .. A[5] .. '|' .. A[3] .. '|' .. A[4])
local status = 'creating'
if state == nil then
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
