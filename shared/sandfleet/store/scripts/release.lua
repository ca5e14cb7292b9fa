-- An agent leaves; with nobody left the sandbox is warm.
-- KEYS  1 prefix
-- ARGV  1 sandbox  2 owner  3 agent
-- Returns 1, or 0 when unknown or not the owner's.
--@use time route story line use
local ms = now_ms()
local key = P .. 'sandbox:' .. A[1]
local sb = call('HMGET', key, 'owner', 'state', 'route')
if sb[1] ~= A[2] then return 0 end
call('ZREM', P .. 'agents:' .. A[1], A[3])
if sb[2] == 'live' then
  call('HSET', key, 'used', ms)
  if settle(A[1], sb[3], ms) then story(A[1], ms, 'warm', where(sb[3])) end
end
return 1
