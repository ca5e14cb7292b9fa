-- Push an agent's holds; one that lapsed or was lost is taken again.
-- KEYS  1 prefix
-- ARGV  1 agent  2 ttl ms  3… sandbox id, owner (a page of pairs)
-- Returns those that are not live any more or not that owner's; none that may yet be announced again.
--@use time route
local ms, ttl = now_ms(), tonumber(A[2])
local gone = {}
local fleet = call('HMGET', P .. 'fleet', 'since', 'recovering')
local unsure = not fleet[1] or tonumber(fleet[2] or 0) > ms
for i = 3, #A, 2 do
  local sid = A[i]
  local sb = call('HMGET', P .. 'sandbox:' .. sid, 'owner', 'state', 'route')
  if sb[1] == A[i + 1] and sb[2] == 'live' then
    local _, node = split(sb[3])
    -- First a write that a full Redis allows: a hold must not lapse for want of memory.
    call('ZREM', P .. 'warm:' .. node, sid)
    call('ZADD', P .. 'agents:' .. sid, ms + ttl, A[1])
    keep(P .. 'agents:' .. sid, math.max(ttl, 2 * DAY))
  elseif sb[1] or not unsure then
    gone[#gone + 1] = sid
  end
end
return gone
