-- Take or extend a lock.
-- KEYS  1 prefix
-- ARGV  1 name  2 token  3 ttl ms
-- Returns 1 if it is held by the token now.
local key = P .. 'lock:' .. A[1]
local holder = call('GET', key)
if holder and holder ~= A[2] then return 0 end
call('SET', key, A[2], 'PX', A[3])
return 1
