-- Reserve bytes of the budgets for a blob; blobs that expired give theirs back first.
-- KEYS  1 prefix
-- ARGV  1 blob  2 client  3 size  4 ttl ms  5 client limit  6 fleet limit
-- Returns 'ok' | 'client' | 'fleet' (the budget that is used up)
--@use time route blobs
local ms, size = now_ms(), tonumber(A[3])
local blob, blobs, bytes = P .. 'blob:' .. A[1], P .. 'blobs', P .. 'bytes'
for _, member in ipairs(call('ZRANGEBYSCORE', blobs, '-inf', ms, 'LIMIT', 0, 100)) do give_back(member) end
local before = call('HGET', blob, 'member')
if before then
  if call('ZSCORE', blobs, before) then give_back(before) end
end
local used = call('HMGET', bytes, 'client:' .. A[2], 'total')
if tonumber(used[1] or 0) + size > tonumber(A[5]) then return 'client' end
if tonumber(used[2] or 0) + size > tonumber(A[6]) then return 'fleet' end
local ttl = tonumber(A[4])
local member = A[3] .. '|' .. A[2] .. '||' .. A[1]
call('HSET', blob, 'member', member, 'expires', ms + ttl, 'chunks', 0)
call('PEXPIRE', blob, ttl)
call('ZADD', blobs, ms + ttl, member)
call('HINCRBY', bytes, 'client:' .. A[2], size)
call('HINCRBY', bytes, 'total', size)
keep(blobs, ttl + DAY)
keep(bytes, ttl + DAY)
return 'ok'
