-- Give a lock back if it is still the token's.
-- KEYS  1 prefix
-- ARGV  1 name  2 token
-- Returns 1 if it was.
local key = P .. 'lock:' .. A[1]
if call('GET', key) ~= A[2] then return 0 end
return call('DEL', key)
