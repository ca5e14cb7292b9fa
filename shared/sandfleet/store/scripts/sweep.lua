-- Node-local upkeep: drop what expired, find who is warm, keep the keys of the living alive.
-- KEYS  1 prefix
-- ARGV  1 node  2 incarnation
-- Returns {sandbox, warm since ms, …} oldest first; empty for another incarnation.
--@use time route story reply use waiters sandbox
local ms, node = now_ms(), A[1]
if call('HGET', P .. 'node:' .. node, 'incarnation') ~= A[2] then return {} end
local places = call('ZRANGE', P .. 'places:' .. node, 0, -1, 'WITHSCORES')
for i = 1, #places, 2 do
  local sid = places[i]
  local key = P .. 'sandbox:' .. sid
  local sb = call('HMGET', key, 'state', 'route', 'owner')
  local _, home, inc
  if sb[1] then _, home, inc = split(sb[2]) end
  if home ~= node then
    call('ZREM', P .. 'places:' .. node, sid)
  elseif inc == A[2] then
    if sb[1] == 'creating' and tonumber(places[i + 1]) <= ms then
      forget(sid, sb[2])
      fail_waiters(sb[3], ms, failure('not_started', 'the creation took longer than its reservation',
        '"sandbox_id":"' .. sid .. '"'))
      story(sid, ms, 'reservation_expired', where(sb[2]))
    else
      call('ZREMRANGEBYSCORE', P .. 'agents:' .. sid, '-inf', ms)
      call('ZREMRANGEBYSCORE', P .. 'busy:' .. sid, '-inf', ms)
      if sb[1] == 'live' and settle(sid, sb[2], ms) then story(sid, ms, 'warm', where(sb[2])) end
      call('PEXPIRE', key, KEEP)
      call('PEXPIRE', P .. 'thread:' .. sb[3], KEEP)
      call('PEXPIRE', P .. 'id:' .. sid, KEEP)
    end
  end
end
-- Operations whose record expired would otherwise stand in line for ever.
for _, id in ipairs(call('ZRANGE', P .. 'inflight:' .. node, 0, 199)) do
  if call('EXISTS', P .. 'op:' .. id) == 0 then call('ZREM', P .. 'inflight:' .. node, id) end
end
return call('ZRANGE', P .. 'warm:' .. node, 0, -1, 'WITHSCORES')
