-- Confirm a creation: creating -> live, every waiter becomes an agent and is answered.
-- KEYS  1 prefix
-- ARGV  1 sandbox  2 node  3 route text  4 what was restored, JSON, or ''
-- Returns 1, or 0 when the reservation is not this route's any more.
--@use time route story reply line waiters sandbox
local ms = now_ms()
local key = P .. 'sandbox:' .. A[1]
local sb = call('HMGET', key, 'state', 'route', 'owner', 'user', 'data_id')
if sb[1] ~= 'creating' or sb[2] ~= A[3] then return 0 end
if tonumber(call('ZSCORE', P .. 'places:' .. A[2], A[1]) or 0) <= ms then return 0 end
take_place(A[1], A[2], sb[4], '+inf')
call('DEL', P .. 'failing:' .. sb[3])
call('HSET', key, 'state', 'live', 'used', ms)
if A[4] ~= '' then call('HSET', key, 'restored', A[4]) end
if sb[5] then call('HSET', P .. 'thread:' .. sb[3], 'data_id', sb[5]) end
if grant_waiters(sb[3], A[3], ms, 'true') == 0 then
  call('ZADD', P .. 'warm:' .. A[2], ms, A[1])
  keep(P .. 'warm:' .. A[2], KEEP)
  kick(ms)
end
story(A[1], ms, 'live', where(A[3]))
return 1
