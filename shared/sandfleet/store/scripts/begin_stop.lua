-- live -> stopping, unless somebody is in it.
-- KEYS  1 prefix
-- ARGV  1 sandbox  2 owner or ''  3 force 0|1  4 reason  5 only if warm since before ms, or ''
--       6 only if no operation is in it and it was not used since ms (then agents do not protect it), or ''
-- Returns {status, now ms, route}
--@use time route story line use
local ms = now_ms()
local key = P .. 'sandbox:' .. A[1]
local sb = call('HMGET', key, 'owner', 'state', 'route', 'used')
if not sb[1] or (A[2] ~= '' and sb[1] ~= A[2]) then return { 'not_found', ms } end
local route = sb[3]
if sb[2] == 'lost' then
  call('DEL', key)
  call('ZREM', P .. 'sandboxes', A[1])
  return { 'lost', ms, route }
end
if sb[2] ~= 'live' then return { sb[2], ms, route } end
local _, node = split(route)
if A[5] ~= '' then
  local since = tonumber(call('ZSCORE', P .. 'warm:' .. node, A[1]) or nil)
  if not since or since > tonumber(A[5]) then return { 'busy', ms, route } end
end
if A[6] ~= '' then
  if tonumber(sb[4]) >= tonumber(A[6]) or has_ops(A[1], ms) then return { 'busy', ms, route } end
elseif A[3] == '0' and in_use(A[1], ms) then
  return { 'busy', ms, route }
end
call('ZREM', P .. 'warm:' .. node, A[1])
call('DEL', P .. 'agents:' .. A[1])
call('HSET', key, 'state', 'stopping', 'used', ms)
call('ZADD', P .. 'stopping:' .. node, ms, A[1])
keep(P .. 'stopping:' .. node, DAY)
story(A[1], ms, 'stopping', text('reason', A[4]) .. where(route))
return { 'recorded', ms, route }
